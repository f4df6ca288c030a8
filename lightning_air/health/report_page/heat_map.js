// One drawing, GPU by time: as many pixels as the screen has, each of the worst reading that falls on it.

class HeatMap {
  constructor(data, map) {
    this.data = data;
    this.map = map;
    this.palette = map.from === undefined && map.unit !== "bits" ? () => 0 : paletteOf(map);
    this.rank = map.unit === "bits" ? (whole) => throttleClass(map.offset + whole - 1) : null;
    this.layOut();
  }

  // Which GPUs have a row, and where it is; nodes have some room between them. Of errors, those GPUs that had any.
  layOut() {
    const { gpus, columns } = this.data, zero = 1 - Math.round(this.map.offset / this.map.step);
    const had = (gpu) => this.map.whole.subarray(gpu * columns, (gpu + 1) * columns).some((whole) => whole && whole !== zero);
    this.rows = gpus.map((_, gpu) => gpu).filter((gpu) => gpus.length <= 8 || !this.map.counts || had(gpu));
    this.isPart = this.rows.length < gpus.length;
    const count = this.rows.length;
    this.rowHeight = count === 1 ? 34 : Math.max(3, Math.min(count <= 4 ? 26 : 18, Math.floor(400 / count)));
    this.room = this.rowHeight >= 4 ? 4 : 2;
    this.tops = [];
    let y = 0;
    this.rows.forEach((gpu, row) => {
      if (row > 0 && gpus[gpu].node !== gpus[this.rows[row - 1]].node) y += this.room;
      this.tops.push(y);
      y += this.rowHeight;
    });
    this.height = Math.max(y, 1);
  }

  rowAt(y) {
    for (let row = this.tops.length - 1; row >= 0; row--)
      if (y >= this.tops[row]) return y < this.tops[row] + this.rowHeight ? row : -1;
    return -1;
  }

  columnAt(seconds) { return Math.floor((seconds - this.data.start) / this.data.seconds); }

  cellAt(row, seconds) {
    const column = this.columnAt(seconds);
    return row < 0 || column < 0 || column >= this.data.columns ? -1 : this.rows[row] * this.data.columns + column;
  }

  worse(one, other) {
    if (this.rank) return this.rank(one) >= this.rank(other) ? one : other;
    return this.map.worst === "min" ? Math.min(one, other) : Math.max(one, other);
  }

  draw(canvas, view) {
    const { pen, width, height, ratio } = prepare(canvas, this.height);
    const plot = width - GUTTER - RIGHT, pixels = Math.max(1, Math.round(plot * ratio)), count = this.tops.length;
    this.drawLabels(pen);
    const hatch = pen.createPattern(hatchTile("gap", "hatch", ratio), "repeat");
    hatch.setTransform(new DOMMatrix().scale(1 / ratio));
    pen.fillStyle = hatch;
    const gap = this.rowHeight >= 9 ? 1 : 0;
    for (const top of this.tops) pen.fillRect(GUTTER, top, plot, this.rowHeight - gap);
    const lost = pen.createPattern(hatchTile("gap", "trouble", ratio), "repeat");
    lost.setTransform(new DOMMatrix().scale(1 / ratio));
    const image = new ImageData(pixels, Math.max(1, count)), colours = new Uint32Array(image.data.buffer);
    const { columns, seconds, start } = this.data, whole = this.map.whole, isLost = this.data.lost;
    const perPixel = (view.to - view.from) / pixels / seconds, first = (view.from - start) / seconds;
    const known = 1 - Math.round(isLost.offset);
    for (let row = 0; row < count; row++) {
      let lostFrom = -1;
      for (let pixel = 0; pixel <= pixels; pixel++) {
        const low = Math.max(0, Math.floor(first + pixel * perPixel + 1e-9));
        const high = Math.min(columns, Math.max(low + 1, Math.ceil(first + (pixel + 1) * perPixel - 1e-9)));
        let worst = 0, gone = false;
        if (pixel < pixels)
          for (let cell = this.rows[row] * columns + low, end = cell - low + high; cell < end; cell++) {
            if (whole[cell]) worst = worst ? this.worse(whole[cell], worst) : whole[cell];
            if (isLost.whole[cell] > known) gone = true;
          }
        if (worst && !gone) colours[row * pixels + pixel] = this.palette(worst);
        if (gone && lostFrom < 0) lostFrom = pixel;
        if (!gone && lostFrom >= 0) {
          pen.fillStyle = lost;
          const wide = Math.max(2, (pixel - lostFrom) / ratio);
          pen.fillRect(GUTTER + lostFrom / ratio, this.tops[row], wide, this.rowHeight - gap);
          lostFrom = -1;
        }
      }
    }
    const source = new OffscreenCanvas(pixels, Math.max(1, count));
    source.getContext("2d").putImageData(image, 0, 0);
    pen.imageSmoothingEnabled = false;
    this.tops.forEach((top, row) =>
      pen.drawImage(source, 0, row, pixels, 1, GUTTER, top, pixels / ratio, this.rowHeight - gap));
    this.drawEvents(pen, view, width);
  }

  drawLabels(pen) {
    const gpus = this.rows.map((gpu) => this.data.gpus[gpu]), faint = ink("faint"), soft = ink("soft");
    if (this.isPart && this.rowHeight >= 12) return this.drawLongLabels(pen, gpus);
    const areSeveral = gpus.some((gpu) => gpu.node !== gpus[0].node);
    const perNode = gpus.map((gpu, row) => row === 0 || gpu.node !== gpus[row - 1].node);
    let free = -Infinity;
    gpus.forEach((gpu, row) => {
      const middle = this.tops[row] + this.rowHeight / 2;
      if (areSeveral && perNode[row]) {
        const last = perNode.indexOf(true, row + 1);
        const bottom = (last < 0 ? this.height : this.tops[last] - this.room);
        const y = this.rowHeight >= 12 ? middle : (this.tops[row] + bottom) / 2;
        if (y - free >= 13) {
          pen.fillStyle = soft;
          pen.textAlign = "left";
          pen.fillText(`node ${gpu.node}`, 0, y);
          free = y;
        }
        pen.fillStyle = faint;
        pen.fillRect(GUTTER - 5, this.tops[row], 1, bottom - this.tops[row]);
      }
      if (this.rowHeight >= 12) {
        pen.fillStyle = soft;
        pen.textAlign = "right";
        pen.fillText(areSeveral ? String(gpu.index) : `GPU ${gpu.index}`, GUTTER - 10, middle);
      }
    });
  }

  drawLongLabels(pen, gpus) {
    const areSeveral = this.data.gpus.some((gpu) => gpu.node !== this.data.gpus[0].node);
    pen.fillStyle = ink("soft");
    pen.textAlign = "right";
    gpus.forEach((gpu, row) => pen.fillText(areSeveral ? `node ${gpu.node} · ${gpu.index}` : `GPU ${gpu.index}`,
      GUTTER - 10, this.tops[row] + this.rowHeight / 2));
  }

  drawEvents(pen, view, width) {
    pen.lineWidth = 1.25;
    for (const event of this.data.events) {
      const row = this.rows.indexOf(event.gpu);
      if (!event.trouble || row < 0) continue;
      let before = -Infinity;
      for (const seconds of event.times) {
        if (seconds < view.from || seconds > view.to) continue;
        const x = view.xOf(seconds, width);
        if (x - before < 12) continue;
        before = x;
        diamond(pen, x, this.tops[row] + this.rowHeight / 2, Math.max(3.5, Math.min(5, this.rowHeight / 2)));
        pen.fillStyle = "#e5352b";
        pen.fill();
        pen.strokeStyle = "#fff";
        pen.stroke();
      }
    }
  }
}

function diamond(pen, x, y, size) {
  pen.beginPath();
  pen.moveTo(x, y - size);
  pen.lineTo(x + size, y);
  pen.lineTo(x, y + size);
  pen.lineTo(x - size, y);
  pen.closePath();
}

function hatchTile(ground, line, ratio) {
  const size = Math.round(6 * ratio), tile = new OffscreenCanvas(size, size), pen = tile.getContext("2d");
  pen.fillStyle = ink(ground);
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = ink(line);
  pen.lineWidth = ratio;
  for (const shift of [-size, 0, size]) {
    pen.beginPath();
    pen.moveTo(shift - 1, size + 1);
    pen.lineTo(shift + size + 1, -1);
    pen.stroke();
  }
  return tile;
}
