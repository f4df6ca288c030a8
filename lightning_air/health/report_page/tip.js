// What is said of the place under the pointer. All text goes in as text: a name cannot become markup.

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function showTip(x, y, ...content) {
  const tip = document.getElementById("tip");
  tip.replaceChildren(...content);
  tip.style.display = "block";
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = Math.max(6, x + 18 + width > innerWidth ? x - width - 18 : x + 18) + "px";
  tip.style.top = Math.max(6, Math.min(y + 16, innerHeight - height - 6)) + "px";
}

function hideTip() { document.getElementById("tip").style.display = "none"; }

function isLostAt(data, cell) { return data.lost.offset + data.lost.whole[cell] - 1 === 1 && data.lost.whole[cell] > 0; }

function gpuTip(data, map, row, cell) {
  const gpu = data.gpus[row], column = cell - row * data.columns, from = data.start + column * data.seconds;
  const words = isLostAt(data, cell) ? "lost: the driver does not reach it" : valueWords(map, valueOf(map, cell), gpu);
  const others = element("dl", "");
  for (const other of data.maps)
    if (other !== map)
      others.append(element("dt", "", other.title), element("dd", "", valueWords(other, valueOf(other, cell), gpu)));
  const events = data.events.filter(
    (event) => event.gpu === row && event.times.some((time) => time >= from && time < from + data.seconds));
  return [
    element("div", isLostAt(data, cell) ? "value bad" : "value", words),
    element("div", "where", `${map.title} · ${gpuWords(data, gpu)} · ${timeWords(from + data.seconds / 2)}`),
    element("div", "where", `${gpu.name} · ${gpu.uuid}`),
    ...events.map((event) => element("p", event.trouble ? "bad" : "", `${event.kind}: ${event.text}`)),
    others,
  ];
}

function eventTip(data, marks) {
  const seen = [...new Set(marks.map((mark) => mark.event))];
  const content = seen.slice(0, 5).map((event) => {
    const [mark] = marks.filter((each) => each.event === event);
    const count = event.times.length > 1 ? ` · ${event.times.length} times in all` : "";
    const box = element("div", "");
    box.append(
      element("div", event.trouble ? "bad" : "", `${event.kind} · ${eventPlace(data, event)}`),
      element("div", "where", timeWords(mark.seconds) + untilWords(mark) + count), element("p", "", event.text));
    return box;
  });
  if (seen.length > 5) content.push(element("p", "where", `and ${seen.length - 5} more here`));
  return content;
}

function untilWords(mark) {
  return mark.end === null ? "" : ` to ${timeWords(mark.end)} (${durationWords(mark.end - mark.seconds)})`;
}

function eventPlace(data, event) {
  if (event.gpu >= 0) return gpuWords(data, data.gpus[event.gpu]);
  return event.uuid ? `${event.uuid}, node ${event.node}` : `node ${event.node}`;
}

function stepTip(steps, at) {
  if (at < 0 || !steps.counts[at]) return [element("div", "where", "no step ended here")];
  const from = steps.start + at * steps.seconds, many = steps.counts[at] > 1;
  return [
    element("div", "value", secondsWords(steps.mean[at]) + (many ? " on average" : "")),
    element("div", "where", many
      ? `${steps.counts[at]} steps, ${secondsWords(steps.low[at])} to ${secondsWords(steps.high[at])}` : "1 step"),
    element("div", "where", `${timeWords(from)} to ${timeWords(from + steps.seconds)}`),
  ];
}
