// The time that is shown: one for all drawings.

const GUTTER = 74, RIGHT = 6;
const STEPS_OF_TIME = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

class View {
  constructor(span, least) {
    this.listeners = [];
    this.renew(span, least);
  }

  renew(span, least) {
    const isWhole = !this.span || this.isWhole;
    this.span = span;
    this.least = Math.min(least, span[1] - span[0]);
    if (isWhole) [this.from, this.to] = span;
    else this.set(this.from, this.to);
  }

  get isWhole() { return this.from <= this.span[0] && this.to >= this.span[1]; }

  set(from, to) {
    const seconds = Math.max(this.least, Math.min(to - from, this.span[1] - this.span[0]));
    const middle = (from + to) / 2;
    this.from = Math.max(this.span[0], Math.min(middle - seconds / 2, this.span[1] - seconds));
    this.to = this.from + seconds;
    for (const listener of this.listeners) listener();
  }

  reset() { this.set(...this.span); }
  last(seconds) { this.set(this.span[1] - seconds, this.span[1]); }
  pan(part) { const by = part * (this.to - this.from); this.set(this.from + by, this.to + by); }

  zoom(factor, at = (this.from + this.to) / 2) {
    this.set(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  xOf(seconds, width) { return GUTTER + ((seconds - this.from) / (this.to - this.from)) * (width - GUTTER - RIGHT); }
  timeAt(x, width) { return this.from + ((x - GUTTER) / (width - GUTTER - RIGHT)) * (this.to - this.from); }
}

// A canvas as sharp as the screen; returns what to draw with, in CSS pixels.
function prepare(canvas, height) {
  const width = canvas.parentElement.clientWidth, ratio = window.devicePixelRatio || 1;
  canvas.style.height = height + "px";
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "12px " + getComputedStyle(document.body).fontFamily;
  pen.textBaseline = "middle";
  return { pen, width, height, ratio };
}

function ticksOf(view, width) {
  const wanted = (view.to - view.from) / Math.max(2, (width - GUTTER) / 110);
  const step = STEPS_OF_TIME.find((each) => each >= wanted) ?? Math.ceil(wanted / 86400) * 86400;
  const shift = isUtc ? 0 : -60 * new Date(1000 * view.from).getTimezoneOffset();
  const ticks = [];
  for (let at = Math.ceil((view.from + shift) / step) * step - shift; at <= view.to; at += step) ticks.push(at);
  return { ticks, step };
}

function drawAxis(canvas, view) {
  const { pen, width } = prepare(canvas, 22);
  const { ticks, step } = ticksOf(view, width);
  const parts = { hour: "2-digit", minute: "2-digit" };
  if (step < 60) parts.second = "2-digit";
  if (step < 1) parts.fractionalSecondDigits = 1;
  pen.fillStyle = ink("soft");
  pen.textAlign = "left";
  pen.fillText(isUtc ? "UTC" : "local time", 0, 10);
  pen.textAlign = "center";
  pen.strokeStyle = ink("faint");
  for (const tick of ticks) {
    const x = view.xOf(tick, width), words = step >= 86400 ? dayWords(tick) : timeWords(tick, parts);
    const half = pen.measureText(words).width / 2;
    pen.fillText(words, Math.min(Math.max(x, GUTTER + half - 8), width - half), 9);
    pen.beginPath();
    pen.moveTo(Math.round(x) + 0.5, 18);
    pen.lineTo(Math.round(x) + 0.5, 22);
    pen.stroke();
  }
}
