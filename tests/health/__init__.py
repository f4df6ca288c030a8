"""GPUHealth, against a library of NVML that the tests steer."""
