// One cache level as a grid of pages in the colours of their adapters. Changed pages glow and fade.

import { colourOf } from "./colours.js";
import { still } from "./dom.js";

const MAX_HEIGHT = 250; // of the grid, in CSS pixels
const MIN_CELL = 4;
const MAX_CELL = 20;
const GLOW_MS = 1100;
const MIN_SHOWN = 128; // pages

export class LevelMap {
  constructor(canvas, onPoint) {
    this.canvas = canvas;
    this.onPoint = onPoint;
    this.owners = []; // page -> owner or undefined
    this.extent = 0; // pages that are shown; the others were never in use
    this.glows = new Map(); // page -> {from, at}
    this.chosen = null;
    this.frame = 0;
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => onPoint(null));
  }

  /** pages: how many. runs: [owner, [[first, after last], …]]. hit: ids whose pages glow.
   *  Returns how many pages, all free, are not shown. */
  update(pages, runs, hit) {
    const owners = new Array(pages);
    for (const [owner, ranges] of runs) {
      for (const [first, end] of ranges) owners.fill(owner, first, end);
    }
    const known = this.owners.length === pages;
    const now = performance.now();
    for (let page = 0; known && !still.matches && page < pages; page += 1) {
      const before = this.owners[page];
      const after = owners[page];
      if (before?.id !== after?.id || (after && hit.has(after.id))) {
        this.glows.set(page, { from: before?.id === after?.id ? undefined : before, at: now });
      }
    }
    this.owners = owners;
    // Pages are allocated from the front, so the end of a large cache is shown only once it is in use.
    const used = owners.findLastIndex((owner) => owner) + 1;
    this.extent = Math.min(pages, this.extent);
    while (this.extent < Math.min(pages, used + used / 4)) this.extent = Math.max(MIN_SHOWN, 2 * this.extent);
    this.extent = Math.min(pages, Math.max(MIN_SHOWN, this.extent));
    this.draw();
    return pages - this.extent;
  }

  choose(id) {
    this.chosen = id;
    this.draw();
  }

  /** Cells of one size that fit; where there are more pages than cells, several share one. */
  grid() {
    const width = this.canvas.clientWidth;
    const pages = this.extent;
    for (let size = MAX_CELL; size >= MIN_CELL; size -= 1) {
      const columns = Math.max(1, Math.floor(width / size));
      if (Math.ceil(pages / columns) * size <= MAX_HEIGHT) return { size, columns, share: 1 };
    }
    const columns = Math.max(1, Math.floor(width / MIN_CELL));
    return { size: MIN_CELL, columns, share: Math.ceil(pages / (columns * Math.floor(MAX_HEIGHT / MIN_CELL))) };
  }

  draw() {
    if (!this.frame) this.frame = requestAnimationFrame(() => this.paint());
  }

  paint() {
    this.frame = 0;
    const { size, columns, share } = this.grid();
    const cells = Math.ceil(this.extent / share);
    const height = Math.max(1, Math.ceil(cells / columns)) * size;
    const scale = window.devicePixelRatio || 1;
    const width = this.canvas.clientWidth;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.height = `${height}px`;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const style = getComputedStyle(document.documentElement);
    const free = style.getPropertyValue("--free");
    const ink = style.getPropertyValue("--ink");
    const colours = new Map();
    const colour = (owner) => {
      if (!colours.has(owner.id)) colours.set(owner.id, colourOf(owner));
      return colours.get(owner.id);
    };
    const gap = size >= 7 ? 2 : 1;
    const now = performance.now();
    for (let cell = 0; cell < cells; cell += 1) {
      const page = this.shown(cell, share);
      const owner = this.owners[page];
      const x = (cell % columns) * size;
      const y = Math.floor(cell / columns) * size;
      const side = size - gap;
      context.globalAlpha = 1;
      context.fillStyle = free;
      context.fillRect(x, y, side, side);
      if (owner) {
        context.globalAlpha = this.chosen && this.chosen !== owner.id ? 0.18 : 1;
        context.fillStyle = colour(owner);
        // No gap between adjacent pages of one adapter.
        const joined = (cell + 1) % columns && this.owners[this.shown(cell + 1, share)]?.id === owner.id;
        context.fillRect(x, y, joined ? size : side, side);
        if (owner.in_use && size >= 8) {
          context.fillStyle = ink;
          const dot = Math.max(2, Math.round(size / 5));
          context.fillRect(x + (side - dot) / 2, y + (side - dot) / 2, dot, dot);
        }
      }
      const glow = this.glows.get(page);
      if (glow) {
        const left = 1 - (now - glow.at) / GLOW_MS;
        if (left <= 0) {
          this.glows.delete(page);
        } else {
          context.fillStyle = owner ? ink : glow.from ? colour(glow.from) : free;
          context.globalAlpha = owner ? left * 0.55 : left;
          context.fillRect(x, y, side, side);
        }
      }
    }
    context.globalAlpha = 1;
    for (const [page, glow] of this.glows) if (now - glow.at > GLOW_MS) this.glows.delete(page);
    if (this.glows.size) this.draw();
  }

  /** The page that a cell shows: the first of its pages that is in use. */
  shown(cell, share) {
    const first = cell * share;
    for (let page = first; page < Math.min(first + share, this.extent); page += 1) {
      if (this.owners[page]) return page;
    }
    return first;
  }

  point(event) {
    const { size, columns, share } = this.grid();
    const column = Math.floor(event.offsetX / size);
    const cell = Math.floor(event.offsetY / size) * columns + column;
    const page = this.shown(cell, share);
    if (column >= columns || page >= this.extent) this.onPoint(null);
    else this.onPoint({ page, owner: this.owners[page] });
  }
}
