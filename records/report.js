"use strict";
// Curves of each track: what is drawn depends on four controls and the legend. Text from logs is only ever set as text.
(() => {
  const WIDEST = 1000, NARROWEST = 300, HEIGHT = 420, LEFT = 70, BOTTOM = 40, TOP = 10, RIGHT = 15;
  const AXES = {time: {column: 0, title: "training time, s", unit: "s"},
                step: {column: 1, title: "optimizer steps", unit: "steps"}};
  const LOSS_TITLE = "loss, nats per token";
  const LOSS = 2;  // column of a point [time, step, loss]

  const make = (parent, name, attributes = {}, text = "") => {
    const space = parent.namespaceURI.endsWith("svg") || name === "svg" ? "http://www.w3.org/2000/svg"
                                                                         : "http://www.w3.org/1999/xhtml";
    const element = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    return parent.appendChild(element);
  };

  const choice = (parent, title, values) => {
    const label = make(parent, "label", {}, `${title} `);
    const select = make(label, "select", {name: title});
    for (const [value, text] of Object.entries(values)) make(select, "option", {value}, text);
    return select;
  };

  const colour = (index) => `hsl(${(index * 137.5 + 210) % 360} 65% 50%)`;

  // Round numbers between low and high, about `count` of them.
  const ticks = (low, high, count) => {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const unit = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
    const found = [];
    for (let k = Math.ceil(low / unit); k * unit <= high; k++) found.push(+(k * unit).toPrecision(6));
    return found;
  };

  const chart = (place, track) => {
    const controls = make(place, "div", {class: "controls"});
    const axis = choice(controls, "against", {time: "training time, s", step: "optimizer steps"});
    const kind = choice(controls, "losses", {val: "of validation", train: "of training"});
    // What shows most: a curve, where validation would be one dot a run.
    if (track.records.every(({runs}) => runs.every(({val}) => val.length <= 1))) kind.value = "train";
    const slider = make(controls, "label", {}, "leave out the first ");
    const from = make(slider, "input", {type: "range", name: "from", min: 0, max: 95, value: 0});
    const shown = make(slider, "output", {});
    const legend = make(place, "div", {class: "controls legend"});
    const boxes = track.records.map((record, index) => {
      const label = make(legend, "label");
      label.style.borderColor = colour(index);
      const box = make(label, "input", {type: "checkbox"});
      box.checked = true;
      make(label, "span", {}, record.name);
      return box;
    });
    const svg = make(place, "svg", {role: "img", "aria-label": "losses"});
    const reading = make(place, "p", {class: "reading"});
    let drawn = [];  // points on the screen: {x, y, text}
    let width = WIDEST;  // of the drawing: that of the page, so that text keeps its size on a phone

    const draw = () => {
      svg.replaceChildren();
      drawn = [];
      width = Math.min(WIDEST, Math.max(NARROWEST, place.clientWidth || WIDEST));
      svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      const {column, title, unit} = AXES[axis.value];
      const runs = track.records.flatMap((record, index) => boxes[index].checked
        ? record.runs.map((run) => ({record, run, index, points: run[kind.value]})) : []);
      for (const entry of runs) entry.points = entry.points.filter((point) => point[column] !== null);
      const right = Math.max(1e-9, ...runs.map(({points}) => Math.max(0, ...points.map((point) => point[column]))));
      const left = right * from.value / 100;
      shown.textContent = ` ${from.value} % (${+left.toPrecision(3)} ${unit})`;
      for (const entry of runs) entry.points = entry.points.filter((point) => point[column] >= left);
      const losses = runs.flatMap(({points}) => points.map((point) => point[LOSS])).concat(track.target);
      const low = Math.min(...losses), high = Math.max(...losses), margin = (high - low || 1) * 0.04;
      const x = (value) => LEFT + (value - left) / (right - left) * (width - LEFT - RIGHT);
      const y = (value) => TOP + (high + margin - value) / (high - low + 2 * margin || 1) * (HEIGHT - TOP - BOTTOM);
      for (const value of ticks(left, right, Math.max(2, Math.floor(width / 120)))) {
        make(svg, "line", {x1: x(value), x2: x(value), y1: TOP, y2: HEIGHT - BOTTOM});
        make(svg, "text", {x: x(value), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle"}, value);
      }
      for (const value of ticks(low - margin, high + margin, 6)) {
        make(svg, "line", {x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value)});
        make(svg, "text", {x: LEFT - 6, y: y(value) + 4, "text-anchor": "end"}, value);
      }
      make(svg, "text", {x: (LEFT + width) / 2, y: HEIGHT - 6, "text-anchor": "middle"}, title);
      const middle = (TOP + HEIGHT - BOTTOM) / 2;
      make(svg, "text", {x: 14, y: middle, "text-anchor": "middle", transform: `rotate(-90 14 ${middle})`}, LOSS_TITLE);
      make(svg, "line", {class: "target", x1: LEFT, x2: width - RIGHT, y1: y(track.target), y2: y(track.target)});
      for (const {record, run, index, points} of runs) {
        const places = points.map((point) => ({x: x(point[column]), y: y(point[LOSS]), point}));
        make(svg, "polyline", {points: places.map((spot) => `${spot.x},${spot.y}`).join(" "), stroke: colour(index),
                               class: record.foreign ? "foreign" : "own"});
        for (const {x: px, y: py, point} of places) {
          if (kind.value === "val") make(svg, "circle", {cx: px, cy: py, r: 2.5, fill: colour(index)});
          const time = point[0] === null ? "" : `${point[0].toFixed(1)} s, `;
          drawn.push({x: px, y: py, text: `${record.name}, ${run.title}: step ${point[1]}, ${time}` +
                                          `loss ${point[LOSS].toFixed(5)} nats per token`});
        }
      }
    };

    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), scale = width / box.width;
      const px = (event.clientX - box.left) * scale, py = (event.clientY - box.top) * scale;
      const distance = (spot) => Math.hypot(spot.x - px, spot.y - py);
      const nearest = drawn.reduce((best, spot) => !best || distance(spot) < distance(best) ? spot : best, null);
      reading.textContent = nearest && distance(nearest) < 60 ? nearest.text : "";
    });
    for (const control of [axis, kind, from, ...boxes]) control.addEventListener("input", draw);
    window.addEventListener("resize", draw);
    draw();
  };

  const data = JSON.parse(document.getElementById("data").textContent);
  for (const place of document.querySelectorAll(".chart")) chart(place, data[place.dataset.track]);
})();
