// Numbers, times and places as a person reads them.

const THROTTLE_NAMES = [
  [0x1, "idle"], [0x2, "clocks set by somebody"], [0x4, "power limit"], [0x8, "hardware slowdown"], [0x10, "sync boost"],
  [0x20, "heat (software)"], [0x40, "heat (hardware)"], [0x80, "power brake"], [0x100, "display clock"],
  [0x200, "board limit"], [0x400, "reliability"],
];
// What is drawn of several reasons is the worst of these.
const THROTTLE_CLASSES = [
  { name: "none", mask: 0, light: "#d6dde3", dark: "#2c3137" },
  { name: "power limit", mask: 0x4, light: "#56a0d3", dark: "#3f86bd" },
  { name: "board, sync or other", mask: 0x7e10, light: "#d9a300", dark: "#d9a300" },
  { name: "heat or hardware slowdown", mask: 0x68, light: "#d55e00", dark: "#f0742a" },
  { name: "power brake", mask: 0x80, light: "#a33e85", dark: "#e07bbf" },
];

function throttleClass(bits) {
  for (let number = THROTTLE_CLASSES.length - 1; number > 0; number--)
    if (bits & THROTTLE_CLASSES[number].mask) return number;
  return 0;
}

function throttleWords(bits) {
  const names = THROTTLE_NAMES.filter(([bit]) => bits & bit).map(([, name]) => name);
  const other = bits & ~0x7ff;
  if (other) names.push("0x" + other.toString(16));
  return names.length ? names.join(", ") : "none";
}

function numberWords(value, step) {
  const digits = step >= 1 ? 0 : Math.ceil(-Math.log10(step));
  return (value + 0).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }).replace("-", "−");
}

function valueWords(map, value, gpu) {
  if (value === null) return "no reading";
  if (map.unit === "bits") return throttleWords(value);
  let words = numberWords(value, map.step) + (map.unit ? " " + map.unit : "");
  if (map.key === "memory_used_pct" && gpu && gpu.memory) {
    const total = gpu.memory / 2 ** 30;
    words += ` (${((value / 100) * total).toFixed(1)} of ${total.toFixed(0)} GiB)`;
  }
  return words;
}

function secondsWords(seconds) {
  if (seconds < 1e-3) return `${(1e6 * seconds).toPrecision(3)} µs`;
  if (seconds < 1) return `${(1e3 * seconds).toPrecision(3)} ms`;
  if (seconds < 120) return `${Number(seconds.toPrecision(3))} s`;
  return durationWords(seconds);
}

function durationWords(seconds) {
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
  if (whole < 60) return `${seconds < 10 ? Number(seconds.toPrecision(2)) : whole} s`;
  if (hours === 0) return `${minutes} min` + (whole % 60 ? ` ${whole % 60} s` : "");
  return `${hours} h` + (minutes ? ` ${minutes} min` : "");
}

let isUtc = true;

function timeWords(seconds, parts = { hour: "2-digit", minute: "2-digit", second: "2-digit" }) {
  const options = { ...parts, hourCycle: "h23", timeZone: isUtc ? "UTC" : undefined };
  return new Intl.DateTimeFormat("en-GB", options).format(new Date(1000 * seconds));
}

function dayWords(seconds) {
  return timeWords(seconds, { day: "numeric", month: "short", year: "numeric" });
}

function gpuWords(data, gpu) {
  const nodes = new Set(data.gpus.map((each) => each.node));
  const instance = gpu.uuid.startsWith("MIG-") ? " (MIG)" : "";
  return `GPU ${gpu.index}${instance}` + (nodes.size > 1 ? `, node ${gpu.node}` : "");
}
