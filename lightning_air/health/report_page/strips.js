// What stands above the maps: when something happened, and how long the optimizer steps took.

class EventStrip {
  constructor(data) {
    this.data = data;
    const areTrouble = data.events.map((event) => event.trouble);
    this.lanes = [true, false].filter((lane) => areTrouble.includes(lane));
    this.height = 20 * this.lanes.length + 2;
    this.marks = [];
  }

  draw(canvas, view) {
    const { pen, width } = prepare(canvas, this.height);
    this.lanes.forEach((isTrouble, lane) => {
      pen.fillStyle = ink("soft");
      pen.fillText(isTrouble ? "trouble" : "other", 0, 20 * lane + 11);
      pen.fillStyle = ink("line");
      pen.fillRect(GUTTER, 20 * lane + 11, width - GUTTER - RIGHT, 1);
    });
    this.marks = [];
    const inside = (x) => Math.max(GUTTER, Math.min(x, width - RIGHT));
    pen.globalAlpha = 0.35;
    for (const event of this.data.events)
      event.times.forEach((seconds, number) => {
        const end = event.ends[number], y = 20 * this.lanes.indexOf(event.trouble) + 11.5;
        if (end !== null && end >= view.from && seconds <= view.to) {
          const [low, high] = [seconds, end].map((each) => inside(view.xOf(each, width)));
          pen.fillStyle = ink(event.trouble ? "trouble" : "soft");
          pen.fillRect(low, y - 2.5, Math.max(1, high - low), 5);
        }
        if (seconds >= view.from && seconds <= view.to)
          this.marks.push({ event, seconds, end, x: view.xOf(seconds, width), y });
      });
    pen.globalAlpha = 1;
    this.marks.sort((one, other) => one.x - other.x);
    const drawn = [-Infinity, -Infinity], colours = [ink("soft"), ink("trouble")];
    pen.strokeStyle = ink("ground");
    pen.lineWidth = 1.5;
    for (const mark of this.marks) {
      const lane = mark.event.trouble ? 1 : 0;
      if (mark.x - drawn[lane] < 7) continue;  // a thousand in a moment are one mark
      drawn[lane] = mark.x;
      pen.fillStyle = colours[lane];
      if (lane) diamond(pen, mark.x, mark.y, 6.5);
      else { pen.beginPath(); pen.arc(mark.x, mark.y, 4, 0, 7); }
      pen.fill();
      pen.stroke();
    }
  }

  near(x, y) {
    return this.marks.filter((mark) => Math.abs(mark.x - x) <= 8 && Math.abs(mark.y - y) <= 10);
  }
}

class StepStrip {
  constructor(data) {
    this.steps = data.steps;
    this.height = 104;
    const known = this.steps.mean.filter((each) => each !== null).sort((one, other) => one - other);
    this.median = known[Math.floor(known.length / 2)];
    this.most = Math.max(...this.steps.high.filter((each) => each !== null));
    // One long validation would make a flat line of all steps: what is far above most of them is cut.
    const usual = known[Math.floor(0.97 * (known.length - 1))];
    this.top = Math.min(1.08 * this.most, Math.max(1.35 * usual, 1.8 * this.median)) || 1;
    this.isCut = this.most > this.top;
  }

  yOf(seconds) { return this.height - 5 - (seconds / this.top) * (this.height - 12); }

  ticks() {
    const unit = 10 ** Math.floor(Math.log10(this.top / 2));
    const step = [5, 2, 1].map((each) => each * unit).find((each) => this.top / each >= 2) ?? unit / 2;
    return Array.from({ length: Math.floor(this.top / step) + 1 }, (_, number) => number * step);
  }

  draw(canvas, view) {
    const { pen, width, height } = prepare(canvas, this.height);
    const steps = this.steps;
    let free = Infinity;
    for (const tick of this.ticks()) {
      const y = Math.round(this.yOf(tick)), middle = Math.max(6, Math.min(y, height - 6));
      pen.fillStyle = ink("line");
      if (y >= 0) pen.fillRect(GUTTER, y, width - GUTTER - RIGHT, 1);
      if (free - middle < 13) continue;
      free = middle;
      pen.fillStyle = ink("soft");
      pen.textAlign = "right";
      pen.fillText(tick ? secondsWords(tick) : "0", GUTTER - 8, middle);
    }
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, width - GUTTER - RIGHT, height);
    pen.clip();
    const wide = Math.max(1, (steps.seconds / (view.to - view.from)) * (width - GUTTER - RIGHT));
    pen.fillStyle = ink("link");
    pen.globalAlpha = 0.26;
    this.each(view, width, (x, at) => {
      const top = this.yOf(steps.high[at]), bottom = this.yOf(steps.low[at]);
      pen.fillRect(x, top, Math.max(1, wide), Math.max(1, bottom - top));
    });
    pen.globalAlpha = 1;
    pen.strokeStyle = ink("link");
    pen.lineWidth = 1.75;
    pen.lineJoin = "round";
    pen.beginPath();
    let before = -2;
    this.each(view, width, (x, at) => {
      const y = this.yOf(steps.mean[at]), middle = x + wide / 2;
      if (at === before + 1) pen.lineTo(middle, y);
      else { pen.moveTo(middle - Math.min(1, wide / 2), y); pen.lineTo(middle, y); }
      before = at;
    });
    pen.stroke();
    pen.fillStyle = ink("link");
    let cut = -Infinity;
    this.each(view, width, (x, at) => {
      const middle = x + wide / 2;
      if (steps.high[at] <= this.top || middle - cut < 9) return;
      cut = middle;
      pen.beginPath();
      pen.moveTo(middle, 0);
      pen.lineTo(middle + 5, 7);
      pen.lineTo(middle - 5, 7);
      pen.fill();
    });
    pen.restore();
  }

  each(view, width, act) {
    const { start, seconds, counts } = this.steps;
    const low = Math.max(0, Math.floor((view.from - start) / seconds) - 1);
    const high = Math.min(counts.length, Math.ceil((view.to - start) / seconds) + 1);
    for (let at = low; at < high; at++) if (counts[at]) act(view.xOf(start + at * seconds, width), at);
  }

  at(seconds) {
    const at = Math.floor((seconds - this.steps.start) / this.steps.seconds);
    return at >= 0 && at < this.steps.counts.length ? at : -1;
  }
}
