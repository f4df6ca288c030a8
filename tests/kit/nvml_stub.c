/* A stand-in for libnvidia-ml.so.1: NVML's functions that we call, answering from a file that a test writes.
 *
 * The file is mapped, so that a test sees calls counted and changes answers while the library is in use. Its layout is
 * `struct state`; tests/kit/nvml_stub.py has the same one. FUNCTIONS is given by the compiler's command line.
 */
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MAX_GPUS 16
#define MAX_INSTANCES 4
#define NUM_FIELDS 320
#define NUM_EVENTS 64
#define UUID_BYTES 96

enum function { FUNCTIONS, NUM_FUNCTIONS };

struct gpu {
    char uuid[UUID_BYTES];
    char name[UUID_BYTES];
    uint64_t memory_used, memory_total, memory_reserved, throttle_reasons, ecc_corrected, ecc_uncorrected;
    uint64_t event_types;
    uint64_t fields[NUM_FIELDS];
    int32_t field_codes[NUM_FIELDS];
    int32_t codes[64]; /* by function; 0 is success */
    uint32_t utilization, temperature, slowdown, shutdown, power_mw, power_limit_mw;
    int32_t margin;
    uint32_t sm_clock, memory_clock, sm_clock_max, memory_clock_max;
    uint32_t remapped_correctable, remapped_uncorrectable, remap_pending, remap_failure;
    uint32_t pcie_replays, pcie_width, pcie_width_max, pcie_generation, pcie_generation_max;
    uint32_t is_lost, is_in_mig_mode, num_instances;
    char instance_uuids[MAX_INSTANCES][UUID_BYTES];
};

struct event {
    uint64_t type, data;
    uint32_t gpu, padding;
};

struct state {
    uint64_t calls[64];
    int32_t codes[64]; /* by function, for all GPUs */
    int32_t hangs[64]; /* by function: blocks as long as it is set */
    uint32_t num_gpus, num_initialised;
    uint64_t num_events_told, num_events;
    struct event events[NUM_EVENTS];
    struct gpu gpus[MAX_GPUS];
};

static struct state *state;

/* Use another file, or none: then there is no driver. */
int stub_attach(const char *path) {
    state = NULL;
    if (path == NULL) return 0;
    int descriptor = open(path, O_RDWR);
    if (descriptor < 0) return -1;
    void *mapped = mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (mapped == MAP_FAILED) return -1;
    state = mapped;
    return 0;
}

uint64_t stub_state_bytes(void) { return sizeof(struct state); }

static void nap(unsigned int milliseconds) {
    struct timespec time = {0, 1000000L * milliseconds};
    nanosleep(&time, NULL);
}

static int enter(enum function function) {
    if (state == NULL) return 12; /* as if there were no library */
    __atomic_fetch_add(&state->calls[function], 1, __ATOMIC_SEQ_CST);
    while (state != NULL && *(volatile int32_t *)&state->hangs[function]) nap(1);
    if (state == NULL) return 9;
    if (state->codes[function]) return state->codes[function];
    if (function != f_nvmlInit && state->num_initialised == 0) return 1;
    return 0;
}

/* A handle is 1 + the GPU's place, and for an instance 1000 * (1 + its place) more. */
static struct gpu *gpu_of(void *handle) { return &state->gpus[((uintptr_t)handle % 1000) - 1]; }
static uintptr_t instance_of(void *handle) { return (uintptr_t)handle / 1000; }

static int enter_gpu(enum function function, void *handle, struct gpu **gpu) {
    int code = enter(function);
    if (code) return code;
    if ((uintptr_t)handle % 1000 > state->num_gpus) return 2;
    *gpu = gpu_of(handle);
    if ((*gpu)->is_lost) return 15;
    return (*gpu)->codes[function];
}

#define GPU(function)                                         \
    struct gpu *gpu;                                          \
    int code = enter_gpu(f_##function, handle, &gpu);         \
    if (code) return code;
#define WHOLE_GPU(function) \
    GPU(function)           \
    if (instance_of(handle)) return 3;
#define NUMBER(function, type, value)          \
    int function(void *handle, type *result) { \
        WHOLE_GPU(function)                    \
        *result = gpu->value;                  \
        return 0;                              \
    }

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    int code = enter(f_nvmlInit);
    if (code == 0) __atomic_fetch_add(&state->num_initialised, 1, __ATOMIC_SEQ_CST);
    return code;
}

int nvmlShutdown(void) {
    int code = enter(f_nvmlShutdown);
    if (code == 0) __atomic_fetch_sub(&state->num_initialised, 1, __ATOMIC_SEQ_CST);
    return code;
}

const char *nvmlErrorString(int code) { return code == 3 ? "Not Supported" : "some error"; }

int nvmlDeviceGetCount_v2(unsigned int *count) {
    int code = enter(f_nvmlDeviceGetCount);
    if (code == 0) *count = state->num_gpus;
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **result) {
    void *handle = (void *)(uintptr_t)(1 + index);
    GPU(nvmlDeviceGetHandleByIndex)
    *result = handle;
    return 0;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned int length) {
    GPU(nvmlDeviceGetUUID)
    uintptr_t instance = instance_of(handle);
    strncpy(uuid, instance ? gpu->instance_uuids[instance - 1] : gpu->uuid, length);
    return 0;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned int length) {
    GPU(nvmlDeviceGetName)
    strncpy(name, gpu->name, length);
    return 0;
}

int nvmlDeviceGetUtilizationRates(void *handle, unsigned int *rates) {
    WHOLE_GPU(nvmlDeviceGetUtilizationRates)
    rates[0] = gpu->utilization;
    rates[1] = 0;
    return 0;
}

struct memory_v2 {
    unsigned int version;
    unsigned long long total, reserved, free, used;
};

int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory) {
    GPU(nvmlDeviceGetMemoryInfo_v2)
    unsigned int share = instance_of(handle) ? gpu->num_instances : 1;
    memory->total = gpu->memory_total / share;
    memory->reserved = gpu->memory_reserved / share;
    memory->used = gpu->memory_used / share;
    memory->free = memory->total - memory->reserved - memory->used;
    return 0;
}

struct memory_v1 {
    unsigned long long total, free, used;
};

int nvmlDeviceGetMemoryInfo(void *handle, struct memory_v1 *memory) {
    GPU(nvmlDeviceGetMemoryInfo)
    memory->total = gpu->memory_total;
    memory->used = gpu->memory_used + gpu->memory_reserved;
    memory->free = memory->total - memory->used;
    return 0;
}

struct temperature_v1 {
    unsigned int version, sensor;
    int temperature;
};

int nvmlDeviceGetTemperatureV(void *handle, struct temperature_v1 *result) {
    WHOLE_GPU(nvmlDeviceGetTemperatureV)
    result->temperature = gpu->temperature;
    return 0;
}

int nvmlDeviceGetTemperature(void *handle, unsigned int sensor, unsigned int *result) {
    (void)sensor;
    WHOLE_GPU(nvmlDeviceGetTemperature)
    *result = gpu->temperature;
    return 0;
}

int nvmlDeviceGetTemperatureThreshold(void *handle, unsigned int threshold, unsigned int *result) {
    WHOLE_GPU(nvmlDeviceGetTemperatureThreshold)
    *result = threshold == 1 ? gpu->slowdown : gpu->shutdown;
    return 0;
}

struct margin_v1 {
    unsigned int version;
    int margin;
};

int nvmlDeviceGetMarginTemperature(void *handle, struct margin_v1 *result) {
    WHOLE_GPU(nvmlDeviceGetMarginTemperature)
    result->margin = gpu->margin;
    return 0;
}

NUMBER(nvmlDeviceGetPowerUsage, unsigned int, power_mw)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned int, power_limit_mw)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, throttle_reasons)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, throttle_reasons)
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned int, pcie_replays)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned int, pcie_width)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned int, pcie_width_max)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned int, pcie_generation)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned int, pcie_generation_max)
NUMBER(nvmlDeviceGetSupportedEventTypes, unsigned long long, event_types)

int nvmlDeviceGetClockInfo(void *handle, unsigned int type, unsigned int *result) {
    WHOLE_GPU(nvmlDeviceGetClockInfo)
    *result = type == 1 ? gpu->sm_clock : gpu->memory_clock;
    return 0;
}

int nvmlDeviceGetMaxClockInfo(void *handle, unsigned int type, unsigned int *result) {
    WHOLE_GPU(nvmlDeviceGetMaxClockInfo)
    *result = type == 1 ? gpu->sm_clock_max : gpu->memory_clock_max;
    return 0;
}

int nvmlDeviceGetTotalEccErrors(void *handle, unsigned int type, unsigned int counter, unsigned long long *result) {
    WHOLE_GPU(nvmlDeviceGetTotalEccErrors)
    if (counter != 0) return 2;
    *result = type == 0 ? gpu->ecc_corrected : gpu->ecc_uncorrected;
    return 0;
}

int nvmlDeviceGetRemappedRows(void *handle, unsigned int *correctable, unsigned int *uncorrectable,
                              unsigned int *pending, unsigned int *failure) {
    WHOLE_GPU(nvmlDeviceGetRemappedRows)
    *correctable = gpu->remapped_correctable;
    *uncorrectable = gpu->remapped_uncorrectable;
    *pending = gpu->remap_pending;
    *failure = gpu->remap_failure;
    return 0;
}

struct field_value {
    uint32_t id, scope;
    int64_t timestamp, latency;
    uint32_t type;
    int32_t code;
    union {
        uint32_t small;
        unsigned long long large;
    } value;
};

int nvmlDeviceGetFieldValues(void *handle, int count, struct field_value *values) {
    WHOLE_GPU(nvmlDeviceGetFieldValues)
    for (int i = 0; i < count; i++) {
        uint32_t id = values[i].id;
        values[i].code = id < NUM_FIELDS ? gpu->field_codes[id] : 2;
        values[i].type = id == 82 || id == 230 ? 1 : 3; /* as the driver has them: unsigned int or unsigned long long */
        if (values[i].code) continue;
        if (gpu->fields[id] == ~0ULL) values[i].type = 99; /* of a driver from the future */
        if (values[i].type == 1) {
            values[i].value.large = ~0ULL; /* whoever reads the wrong member sees it */
            values[i].value.small = (uint32_t)gpu->fields[id];
        } else {
            values[i].value.large = gpu->fields[id];
        }
    }
    return 0;
}

int nvmlDeviceGetMigMode(void *handle, unsigned int *current, unsigned int *pending) {
    GPU(nvmlDeviceGetMigMode)
    *current = *pending = gpu->is_in_mig_mode;
    return 0;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned int *count) {
    GPU(nvmlDeviceGetMaxMigDeviceCount)
    *count = 7;
    return 0;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned int index, void **instance) {
    GPU(nvmlDeviceGetMigDeviceHandleByIndex)
    if (index >= gpu->num_instances) return 6;
    *instance = (void *)((uintptr_t)handle + 1000 * (uintptr_t)(1 + index));
    return 0;
}

int nvmlEventSetCreate(void **set) {
    int code = enter(f_nvmlEventSetCreate);
    *set = (void *)(uintptr_t)1;
    return code;
}

int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, void *set) {
    (void)set;
    WHOLE_GPU(nvmlDeviceRegisterEvents)
    return types & ~gpu->event_types ? 3 : 0;
}

struct event_data {
    void *device;
    unsigned long long type, data;
    unsigned int gpu_instance, compute_instance;
};

int nvmlEventSetWait_v2(void *set, struct event_data *data, unsigned int milliseconds) {
    (void)set;
    int code = enter(f_nvmlEventSetWait);
    if (code) return code;
    for (unsigned int waited = 0;; waited += 20) { /* seldom, or it would cost what the real one does not */
        if (state == NULL) return 1;
        if (state->codes[f_nvmlEventSetWait]) return state->codes[f_nvmlEventSetWait];
        if (*(volatile uint64_t *)&state->num_events_told < *(volatile uint64_t *)&state->num_events) break;
        if (waited >= milliseconds) return 10;
        nap(20);
    }
    struct event *event = &state->events[state->num_events_told++ % NUM_EVENTS];
    data->device = (void *)(uintptr_t)(1 + event->gpu);
    data->type = event->type;
    data->data = event->data;
    data->gpu_instance = data->compute_instance = 0xFFFFFFFF;
    return 0;
}

int nvmlEventSetFree(void *set) {
    (void)set;
    return enter(f_nvmlEventSetFree);
}
