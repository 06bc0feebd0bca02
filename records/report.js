"use strict";
// Curves of each track: what is drawn depends on four controls and the legend. Text from logs is only ever set as text.
(() => {
  const WIDTH = 1000, HEIGHT = 420, LEFT = 55, BOTTOM = 40, TOP = 10, RIGHT = 15;
  const AXES = {time: {column: 0, title: "training time, s"}, step: {column: 1, title: "step"}};
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
    for (const value of values) make(select, "option", {value}, value);
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
    const axis = choice(controls, "against", ["time", "step"]);
    const kind = choice(controls, "losses", ["val", "train"]);
    const from = make(make(controls, "label", {}, "leave out the first "), "input",
                      {type: "range", name: "from", min: 0, max: 95, value: 0});
    const legend = make(place, "div", {class: "controls legend"});
    const boxes = track.records.map((record, index) => {
      const label = make(legend, "label");
      label.style.borderColor = colour(index);
      const box = make(label, "input", {type: "checkbox"});
      box.checked = true;
      make(label, "span", {}, record.name);
      return box;
    });
    const svg = make(place, "svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": "losses"});
    const reading = make(place, "p", {class: "reading"});
    let drawn = [];  // points on the screen: {x, y, text}

    const draw = () => {
      svg.replaceChildren();
      drawn = [];
      const {column, title} = AXES[axis.value];
      const runs = track.records.flatMap((record, index) => boxes[index].checked
        ? record.runs.map((run) => ({record, run, index, points: run[kind.value]})) : []);
      const right = Math.max(1e-9, ...runs.map(({points}) => Math.max(...points.map((point) => point[column]))));
      const left = right * from.value / 100;
      for (const entry of runs) entry.points = entry.points.filter((point) => point[column] >= left);
      const losses = runs.flatMap(({points}) => points.map((point) => point[LOSS])).concat(track.target);
      const low = Math.min(...losses), high = Math.max(...losses), margin = (high - low || 1) * 0.04;
      const x = (value) => LEFT + (value - left) / (right - left) * (WIDTH - LEFT - RIGHT);
      const y = (value) => TOP + (high + margin - value) / (high - low + 2 * margin || 1) * (HEIGHT - TOP - BOTTOM);
      for (const value of ticks(left, right, 8)) {
        make(svg, "line", {x1: x(value), x2: x(value), y1: TOP, y2: HEIGHT - BOTTOM});
        make(svg, "text", {x: x(value), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle"}, value);
      }
      for (const value of ticks(low - margin, high + margin, 6)) {
        make(svg, "line", {x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value)});
        make(svg, "text", {x: LEFT - 6, y: y(value) + 4, "text-anchor": "end"}, value);
      }
      make(svg, "text", {x: (LEFT + WIDTH) / 2, y: HEIGHT - 6, "text-anchor": "middle"}, title);
      make(svg, "line", {class: "target", x1: LEFT, x2: WIDTH - RIGHT, y1: y(track.target), y2: y(track.target)});
      for (const {record, run, index, points} of runs) {
        const places = points.map((point) => ({x: x(point[column]), y: y(point[LOSS]), point}));
        make(svg, "polyline", {points: places.map((spot) => `${spot.x},${spot.y}`).join(" "), stroke: colour(index)});
        for (const {x: px, y: py, point} of places) {
          if (kind.value === "val") make(svg, "circle", {cx: px, cy: py, r: 2.5, fill: colour(index)});
          drawn.push({x: px, y: py, text: `${record.name}, seed ${run.seed}: step ${point[1]}, ` +
                                          `${point[0].toFixed(1)} s, loss ${point[LOSS].toFixed(5)}`});
        }
      }
    };

    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), scale = WIDTH / box.width;
      const px = (event.clientX - box.left) * scale, py = (event.clientY - box.top) * scale;
      const distance = (spot) => Math.hypot(spot.x - px, spot.y - py);
      const nearest = drawn.reduce((best, spot) => !best || distance(spot) < distance(best) ? spot : best, null);
      reading.textContent = nearest && distance(nearest) < 60 ? nearest.text : "";
    });
    for (const control of [axis, kind, from, ...boxes]) control.addEventListener("input", draw);
    draw();
  };

  const data = JSON.parse(document.getElementById("data").textContent);
  for (const place of document.querySelectorAll(".chart")) chart(place, data[place.dataset.track]);
})();
