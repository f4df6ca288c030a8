"use strict";
// The data of a report: from base64 to the values of each GPU at each poll. Nothing here touches the page.

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function decode(text) {
  const bytes = await inflate(text.trim());
  const length = new DataView(bytes.buffer).getUint32(0, true);
  const data = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  const cells = data.gpus.length * data.columns;
  let place = 4 + length;
  for (const map of data.maps) {
    map.whole = unfold(bytes, place, data.gpus.length, data.columns);
    place += 2 * cells;
  }
  const [lost, ...maps] = data.maps;
  data.lost = lost;
  data.maps = maps;
  data.span = [data.start, data.end];
  if (data.gpus.length === 0 || data.columns === 0) data.span = spanWithoutGpus(data);
  for (const map of maps) addExtremes(map, data);
  return data;
}

function unfold(bytes, place, rows, columns) {
  const cells = rows * columns, whole = new Uint16Array(cells);
  for (let row = 0, cell = 0; row < rows; row++) {
    let before = 0;
    for (let column = 0; column < columns; column++, cell++) {
      const folded = bytes[place + cell] | (bytes[place + cells + cell] << 8);
      before = (before + ((folded >>> 1) ^ -(folded & 1))) & 0xffff;
      whole[cell] = before;
    }
  }
  return whole;
}

function spanWithoutGpus(data) {
  const times = data.events.flatMap((event) => event.times);
  if (data.steps) times.push(data.steps.start, data.steps.start + data.steps.seconds * data.steps.counts.length);
  if (times.length === 0) return [0, 60];
  const first = Math.min(...times), last = Math.max(...times), room = Math.max(1, 0.02 * (last - first));
  return [first - room, last + room];
}

// null is a gap.
function valueOf(map, cell) {
  const whole = map.whole[cell];
  return whole === 0 ? null : map.offset + (whole - 1) * map.step;
}

function addExtremes(map, data) {
  let least = 65536, most = 0, leastAt = -1, mostAt = -1;
  for (let cell = 0; cell < map.whole.length; cell++) {
    const whole = map.whole[cell];
    if (whole === 0) continue;
    if (whole < least) { least = whole; leastAt = cell; }
    if (whole > most) { most = whole; mostAt = cell; }
  }
  map.extreme = map.worst === "min" ? leastAt : mostAt;
  map.other = map.worst === "min" ? mostAt : leastAt;
  if (mostAt < 0) return;
  map.from = map.low ?? nice(valueOf(map, leastAt), -1);
  map.to = map.high ?? nice(valueOf(map, mostAt), 1);
  if (map.low === null) map.from = Math.max(Math.min(map.from, 0), Math.min(map.from, map.to - map.span));
  if (map.to - map.from < map.span) map.to = map.from + map.span;
}

// The next round number in a direction.
function nice(value, direction) {
  const size = Math.abs(value);
  const unit = size > 1000 ? 100 : size > 200 ? 50 : size > 20 ? 5 : 1;
  return direction * Math.ceil((direction * value) / unit) * unit;
}
