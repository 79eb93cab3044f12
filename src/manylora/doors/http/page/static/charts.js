// Lines over the last five minutes, as SVG.

import { byId, make, setText } from "./dom.js";

const MAX_POINTS = 150;
const NEAR = 5;
const SVG = "http://www.w3.org/2000/svg";
let points = [];

const CHARTS = [
  { id: "chart-tokens", lines: [["tokens_per_s", "area"], ["tokens_per_s", ""]], unit: (v) => `${whole(v)} tokens/s` },
  { id: "chart-ttft", lines: [["ttft_p95_ms", "slow"], ["ttft_p50_ms", ""]], unit: milliseconds },
  { id: "chart-latency", lines: [["latency_p95_ms", "slow"], ["latency_p50_ms", ""]], unit: milliseconds },
];

export function reset() {
  points = [];
}

export function show(state) {
  const hasNewPoints = state.points.length > 0;
  points = [...points, ...state.points].slice(-MAX_POINTS);
  const last = state.last_minute;
  setText(byId("now-tokens"), `${whole(last.tokens_per_s)} tokens/s`);
  const queue = points.at(-1);
  const busy = queue ? ` · ${queue.running} running, ${queue.waiting} waiting` : "";
  setText(byId("now-requests"), `${last.requests_per_s} answers/s${busy}`);
  pair("ttft", last.ttft_p50_ms, last.ttft_p95_ms);
  pair("latency", last.latency_p50_ms, last.latency_p95_ms);
  if (hasNewPoints || !byId("chart-tokens").hasChildNodes()) CHARTS.forEach(draw);
}

function pair(name, median, slow) {
  setText(byId(`now-${name}`), median === null ? "–" : milliseconds(median));
  const line = byId(`now-${name}95`);
  if (!line.hasChildNodes()) {
    line.append(make("span", "key-fast", "median"), " ", make("span", "key-slow"));
  }
  setText(line.lastChild, slow === null ? "slowest 5 %" : `slowest 5 % from ${milliseconds(slow)}`);
}

function draw({ id, lines, unit }) {
  const box = byId(id);
  const values = points.flatMap((point) => lines.map(([key]) => point[key] ?? 0));
  const top = ceiling(Math.max(0, ...values));
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${MAX_POINTS - 1} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  for (const [key, kind] of lines) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", kind === "area" ? area(key, top) : line(key, top));
    if (kind) path.setAttribute("class", kind);
    svg.append(path);
    if (kind === "area") continue;
    const dots = document.createElementNS(SVG, "path");
    dots.setAttribute("d", alone(key, top));
    dots.setAttribute("class", `dots ${kind}`);
    svg.append(dots);
  }
  box.replaceChildren(svg, make("span", "top-value", top ? unit(top) : ""));
}

const x = (index) => MAX_POINTS - points.length + index;
const y = (value, top) => (top ? 100 - (96 * value) / top : 100).toFixed(2);

const near = (a, b) => Math.abs(a - b) <= NEAR;
const told = (key) => points.flatMap((point, index) => (point[key] === null ? [] : [index]));

/** A point where nothing ended is left out, and the line goes on to the next one if that is near. */
function line(key, top) {
  const at = told(key);
  return at.map((index, i) => `${near(index, at[i - 1]) ? "L" : "M"}${x(index)} ${y(points[index][key], top)}`).join("");
}

/** What has no neighbour to be joined with, as dots. */
function alone(key, top) {
  const at = told(key);
  const lone = at.filter((index, i) => !near(index, at[i - 1]) && !near(index, at[i + 1]));
  return lone.map((index) => `M${x(index)} ${y(points[index][key], top)}h0.01`).join("");
}

function area(key, top) {
  if (!points.length) return "";
  const inside = points.map((point, index) => `L${x(index)} ${y(point[key], top)}`).join("");
  return `M${x(0)} 100${inside}L${x(points.length - 1)} 100Z`;
}

function ceiling(value) {
  if (value <= 0) return 0;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 5, 10].map((step) => step * power).find((step) => step >= value);
}

function whole(value) {
  return Math.round(value).toLocaleString("en");
}

function milliseconds(value) {
  return value >= 1000 ? `${(value / 1000).toFixed(1)} s` : `${value >= 10 ? Math.round(value) : value.toFixed(1)} ms`;
}
