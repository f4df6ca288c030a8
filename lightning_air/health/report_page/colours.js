// Viridis (Smith and van der Walt, CC0): even to the eye, and told apart by the colour-blind and in grey.

const STOPS = [
  "440154", "481568", "482677", "453781", "404788", "39568c", "33638d", "2d708e", "287d8e", "238a8d", "1f968b",
  "20a387", "29af7f", "3cbb75", "55c667", "73d055", "95d840", "b8de29", "dce319", "fde725",
].map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));

const RAMP = Array.from({ length: 256 }, (_, number) => {
  const at = (number / 255) * (STOPS.length - 1), low = Math.min(Math.floor(at), STOPS.length - 2), part = at - low;
  return STOPS[low].map((value, channel) => Math.round(value + part * (STOPS[low + 1][channel] - value)));
});

function packed(red, green, blue) {
  return (255 << 24) | (blue << 16) | (green << 8) | red;
}

const PACKED_RAMP = RAMP.map((colour) => packed(...colour));

function packedHex(hex) {
  return packed(...[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
}

const darkness = matchMedia("(prefers-color-scheme: dark)");

function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function throttleColour(number) {
  return THROTTLE_CLASSES[number][darkness.matches ? "dark" : "light"];
}

// From the number that is stored to the colour.
function paletteOf(map) {
  if (map.unit === "bits") {
    const classes = THROTTLE_CLASSES.map((_, number) => packedHex(throttleColour(number)));
    return (whole) => classes[throttleClass(map.offset + whole - 1)];
  }
  const quiet = packedHex(darkness.matches ? THROTTLE_CLASSES[0].dark : THROTTLE_CLASSES[0].light);
  const zero = map.counts ? 1 - Math.round(map.offset / map.step) : -1;  // nothing has happened there
  const scale = (255 * map.step) / (map.to - map.from), shift = (255 * (map.offset - map.from)) / (map.to - map.from);
  return (whole) =>
    whole === zero ? quiet : PACKED_RAMP[Math.max(0, Math.min(255, Math.round(shift + (whole - 1) * scale)))];
}
