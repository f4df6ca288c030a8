// Puts the drawings on the page, and lets the time be chosen: drag, double-click, buttons, keys.

const report = { data: null, view: null, plots: [], isDragging: false };
const byId = (id) => document.getElementById(id);

async function load(text) {
  const data = await decode(text);
  report.data = data;
  const span = data.span;
  if (data.steps && data.gpus.length) {
    span[0] = Math.min(span[0], Math.max(data.steps.start, span[0] - 0.25 * (span[1] - span[0])));
  }
  if (report.view) report.view.renew(span, 4 * data.seconds);
  else {
    report.view = new View(span, 4 * data.seconds);
    report.view.listeners.push(drawSoon);
  }
  build();
  draw();
}

function build() {
  const data = report.data, plots = byId("plots");
  report.plots = [];
  plots.replaceChildren();
  hideTip();
  const events = new EventStrip(data);
  if (data.events.length)
    addPlot(plots, events, "Events", "", [], (x, y) => {
      const near = events.near(x, y);
      return near.length ? eventTip(data, near) : null;
    });
  if (data.steps) {
    const steps = new StepStrip(data), note = "from the end of one optimizer step to the end of the next";
    const cut = steps.isCut ? `, ▲ longer (up to ${secondsWords(steps.most)})` : "";
    const legend = [element("span", "", "line: mean, band: shortest to longest" + cut)];
    const head = addPlot(plots, steps, "Step time", note, legend,
      (x, y, seconds) => stepTip(data.steps, steps.at(seconds))).head;
    head.insertBefore(element("span", "extreme", "median ", element("b", "", secondsWords(steps.median))), head.lastChild);
  }
  for (const map of data.maps) {
    const heat = new HeatMap(data, map);
    const plot = addPlot(plots, heat, map.title, (map.unit && map.unit !== "bits" ? map.unit + ", " : "") + map.note,
      legendOf(map), (x, y, seconds) => {
        const row = heat.rowAt(y), cell = heat.cellAt(row, seconds);
        return cell < 0 ? null : gpuTip(data, map, heat.rows[row], cell);
      });
    plot.heat = heat;
    if (heat.isPart) {
      const others = data.gpus.length - heat.rows.length;
      plot.head.firstChild.append(element("small", "", `; none on the other ${others} GPUs`));
    }
    addExtreme(plot, map);
  }
}

function addPlot(parent, drawing, title, note, legend, tip) {
  const canvas = element("canvas", ""), cross = element("div", "cross"), pick = element("div", "pick");
  const mark = element("div", "rowmark"), field = element("div", "field", canvas, mark, cross, pick);
  const heading = element("h2", "", title + " ", element("small", "", note));
  const head = element("div", "head", heading, element("div", "legend", ...legend));
  parent.append(element("div", "plot", head, field));
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", title + (note ? ", " + note : ""));
  const plot = { drawing, canvas, field, cross, pick, mark, head, tip, title };
  report.plots.push(plot);
  follow(plot);
  return plot;
}

function legendOf(map) {
  const gap = element("span", "", element("span", "swatch gap"), "no reading");
  const lost = report.data.lost.whole.some((whole, cell) => isLostAt(report.data, cell))
    ? [element("span", "", element("span", "swatch lost"), "GPU lost")] : [];
  if (map.unit === "bits") {
    const used = new Set();
    for (const whole of map.whole) if (whole) used.add(throttleClass(map.offset + whole - 1));
    return [...[...used].sort().map((number) => {
      const swatch = element("span", "swatch");
      swatch.style.background = throttleColour(number);
      return element("span", "", swatch, THROTTLE_CLASSES[number].name);
    }), ...lost, gap];
  }
  const ramp = element("canvas", "");
  ramp.width = 256;
  ramp.height = 1;
  const pen = ramp.getContext("2d"), image = pen.createImageData(256, 1);
  new Uint32Array(image.data.buffer).set(PACKED_RAMP);
  pen.putImageData(image, 0, 0);
  const ends = [map.from, map.to].map((value) => numberWords(value, 1) + (map.unit ? " " + map.unit : ""));
  const zero = element("span", "swatch"), none = map.counts ? [element("span", "", zero, "none")] : [];
  zero.style.background = throttleColour(0);
  if (map.counts) ends[0] = "";
  return [...none, element("span", "scale", ends[0], ramp, ends[1]), ...lost, gap];
}

// The worst reading of all, in words; a click goes there.
function addExtreme(plot, map) {
  if (map.extreme < 0 || map.unit === "bits") return;
  const data = report.data, row = Math.floor(map.extreme / data.columns);
  const seconds = data.start + (map.extreme % data.columns + 0.5) * data.seconds;
  const words = valueWords(map, valueOf(map, map.extreme), data.gpus[row]);
  if (map.whole[map.extreme] === map.whole[map.other]) {
    plot.head.insertBefore(element("span", "extreme", "always ", element("b", "", words)), plot.head.lastChild);
    return;
  }
  const button = element("button", "extreme", map.worst === "min" ? "lowest " : "highest ", element("b", "", words),
    ` · ${gpuWords(data, data.gpus[row])} · ${timeWords(seconds)}`);
  button.title = "Go there";
  button.addEventListener("click", () => report.view.set(seconds - 30 * data.seconds, seconds + 30 * data.seconds));
  plot.head.insertBefore(button, plot.head.lastChild);
}

function follow(plot) {
  let begun = null;
  const place = (event) => {
    const box = plot.field.getBoundingClientRect();
    return { x: Math.max(GUTTER, Math.min(event.clientX - box.left, box.width - RIGHT)), y: event.clientY - box.top, box };
  };
  plot.field.addEventListener("pointermove", (event) => {
    const { x, y, box } = place(event), seconds = report.view.timeAt(x, box.width);
    showCross(seconds);
    if (begun !== null) {
      for (const each of report.plots) {
        each.pick.style.display = "block";
        each.pick.style.left = Math.min(begun, x) + "px";
        each.pick.style.width = Math.abs(x - begun) + "px";
      }
      const ends = [begun, x].map((each) => report.view.timeAt(each, box.width)).sort((one, other) => one - other);
      showTip(event.clientX, event.clientY, `${ends.map((end) => timeWords(end)).join(" to ")} (${durationWords(ends[1] - ends[0])})`);
      return;
    }
    const content = event.clientX - box.left < GUTTER ? null : plot.tip(x, y, seconds);
    if (content) showTip(event.clientX, event.clientY, ...content);
    else hideTip();
    markRow(plot, content ? y : -1);
  });
  plot.field.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.pointerType === "touch") return;
    begun = place(event).x;
    report.isDragging = true;
    plot.field.setPointerCapture(event.pointerId);
  });
  plot.field.addEventListener("pointerup", (event) => {
    if (begun === null) return;
    const { x, box } = place(event), ends = [begun, x].map((each) => report.view.timeAt(each, box.width));
    const isDrag = Math.abs(x - begun) > 4;
    stop();
    if (isDrag) report.view.set(Math.min(...ends), Math.max(...ends));
  });
  const stop = () => {
    begun = null;
    report.isDragging = false;
    for (const each of report.plots) each.pick.style.display = "none";
  };
  plot.field.addEventListener("pointercancel", stop);
  plot.field.addEventListener("pointerleave", () => {
    hideTip();
    markRow(plot, -1);
    for (const each of report.plots) each.cross.style.display = "none";
  });
  plot.field.addEventListener("dblclick", () => report.view.reset());
  plot.field.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;  // the page scrolls
    event.preventDefault();
    const { x, box } = place(event);
    report.view.zoom(event.deltaY > 0 ? 1.25 : 0.8, report.view.timeAt(x, box.width));
  }, { passive: false });
}

function showCross(seconds) {
  for (const plot of report.plots) {
    plot.cross.style.display = "block";
    plot.cross.style.left = report.view.xOf(seconds, plot.field.clientWidth) + "px";
  }
}

function markRow(plot, y) {
  const row = plot.heat ? plot.heat.rowAt(y) : -1;
  plot.mark.style.display = row < 0 || y < 0 ? "none" : "block";
  if (row < 0) return;
  Object.assign(plot.mark.style, { left: GUTTER + "px", right: RIGHT + "px", top: plot.heat.tops[row] + "px",
    height: plot.heat.rowHeight + "px" });
}

let isAwaited = false;

function drawSoon() {
  if (isAwaited) return;
  isAwaited = true;
  requestAnimationFrame(() => { isAwaited = false; draw(); });
}

function draw() {
  const view = report.view;
  if (!view) return;
  drawAxis(byId("axis"), view);
  for (const plot of report.plots) plot.drawing.draw(plot.canvas, view);
  const day = dayWords(view.from), other = dayWords(view.to);
  byId("range").replaceChildren(element("b", "", `${timeWords(view.from)} – ${timeWords(view.to)}`),
    ` · ${durationWords(view.to - view.from)} · ${day === other ? day : `${day} – ${other}`}`);
  byId("reset").disabled = view.isWhole;
  for (const button of document.querySelectorAll("[data-last]"))
    button.hidden = Number(button.dataset.last) >= view.span[1] - view.span[0];
}

function listen() {
  byId("reset").addEventListener("click", () => report.view.reset());
  byId("in").addEventListener("click", () => report.view.zoom(0.5));
  byId("out").addEventListener("click", () => report.view.zoom(2));
  byId("earlier").addEventListener("click", () => report.view.pan(-0.5));
  byId("later").addEventListener("click", () => report.view.pan(0.5));
  for (const button of document.querySelectorAll("[data-last]"))
    button.addEventListener("click", () => report.view.last(Number(button.dataset.last)));
  byId("zone").addEventListener("click", () => {
    isUtc = !isUtc;
    byId("zone").textContent = isUtc ? "Show local time" : "Show UTC";
    showTimes();
    build();
    draw();
  });
  const keys = { ArrowLeft: () => report.view.pan(-0.25), ArrowRight: () => report.view.pan(0.25),
    "+": () => report.view.zoom(0.5), "=": () => report.view.zoom(0.5), "-": () => report.view.zoom(2),
    0: () => report.view.reset(), Escape: () => report.view.reset() };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !report.view || !keys[event.key]) return;
    if (event.key.startsWith("Arrow") && document.activeElement.closest(".scroll")) return;
    keys[event.key]();
    event.preventDefault();
  });
  addEventListener("resize", drawSoon);
  darkness.addEventListener("change", () => { if (report.data) { build(); draw(); } });
}

function showTimes() {
  for (const cell of document.querySelectorAll("time[data-seconds]")) {
    const seconds = Number(cell.dataset.seconds);
    cell.textContent = `${dayWords(seconds)}, ${timeWords(seconds)}${isUtc ? " UTC" : ""}`;
  }
}

async function begin() {
  try {
    if (typeof DecompressionStream === "undefined" || typeof OffscreenCanvas === "undefined")
      throw new Error("this browser is too old: it lacks DecompressionStream or OffscreenCanvas (Chrome 80, Firefox 113, Safari 16.4)");
    listen();
    await load(byId("data").textContent);
    document.documentElement.dataset.state = "drawn";
  } catch (error) {
    byId("broken").textContent = `The drawings are missing: ${error.message}.`;
    byId("broken").hidden = false;
    document.documentElement.dataset.state = "broken";
  }
}

begin();
