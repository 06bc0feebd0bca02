"use strict";
// Learning curves of each track, both axes logarithmic. Text from logs is only ever set as text.
(() => {
  const WIDEST = 1000, NARROWEST = 300, HEIGHT = 420, LEFT = 62, BOTTOM = 40, TOP = 10, RIGHT = 15;
  const AXES = {time: {column: 0, title: "training time, s"}, step: {column: 1, title: "optimizer steps"}};
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

  // Colours far apart, dark and light by turns: the first record is blue.
  const colour = (index, count) => `hsl(${210 + index * 360 / Math.max(count, 1)} 65% ${index % 2 ? 62 : 42}%)`;

  // 1, 2 and 5 times powers of ten between low and high; finer numbers where these are fewer than two.
  const ticks = (low, high) => {
    for (const leading of [[1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9], Array.from({length: 90}, (_, k) => 1 + k / 10)]) {
      const found = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
        for (const digit of leading) {
          const value = +(digit * 10 ** power).toPrecision(3);
          if (value >= low && value <= high) found.push(value);
        }
      if (found.length > 3) return found.length > 12 ? found.filter((_, k) => k % Math.ceil(found.length / 8) === 0) : found;
    }
    return [low, high];
  };

  const chart = (place, track) => {
    const controls = make(place, "div", {class: "controls"});
    const axis = choice(controls, "against", {time: "training time, s", step: "optimizer steps"});
    const kind = choice(controls, "losses", {train: "of training", val: "of validation"});
    const legend = make(place, "div", {class: "controls legend"});
    const boxes = track.records.map((record, index) => {
      const label = make(legend, "label");
      label.style.borderColor = colour(index, track.records.length);
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
      const {column, title} = AXES[axis.value];
      const runs = track.records.flatMap((record, index) => boxes[index].checked
        ? record.runs.map((run) => ({record, run, index, points: run[kind.value].filter((point) => point[column] > 0)})) : []);
      const all = runs.flatMap(({points}) => points);
      const xs = all.map((point) => point[column]), losses = all.map((point) => point[LOSS]);
      if (kind.value === "val") losses.push(track.target);
      if (!all.length) return;
      const [left, right] = [Math.min(...xs) / 1.05, Math.max(...xs) * 1.05];
      const [low, high] = [Math.min(...losses) / 1.02, Math.max(...losses) * 1.02];
      const x = (value) => LEFT + Math.log(value / left) / Math.log(right / left) * (width - LEFT - RIGHT);
      const y = (value) => TOP + Math.log(high / value) / Math.log(high / low) * (HEIGHT - TOP - BOTTOM);
      for (const value of ticks(left, right)) {
        make(svg, "line", {x1: x(value), x2: x(value), y1: TOP, y2: HEIGHT - BOTTOM});
        make(svg, "text", {x: x(value), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle"}, value);
      }
      for (const value of ticks(low, high)) {
        make(svg, "line", {x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value)});
        make(svg, "text", {x: LEFT - 6, y: y(value) + 4, "text-anchor": "end"}, value);
      }
      make(svg, "text", {x: (LEFT + width) / 2, y: HEIGHT - 6, "text-anchor": "middle"}, title);
      const middle = (TOP + HEIGHT - BOTTOM) / 2;
      make(svg, "text", {x: 14, y: middle, "text-anchor": "middle", transform: `rotate(-90 14 ${middle})`}, "loss, nats per token");
      if (kind.value === "val") {  // training losses, of one step each, are not what the target is of
        make(svg, "line", {class: "target", x1: LEFT, x2: width - RIGHT, y1: y(track.target), y2: y(track.target)});
        make(svg, "text", {x: width - RIGHT, y: y(track.target) - 5, "text-anchor": "end"}, `target ${track.target}`);
      }
      for (const {record, run, index, points} of runs) {
        const tone = colour(index, track.records.length);
        const places = points.map((point) => ({x: x(point[column]), y: y(point[LOSS]), point}));
        make(svg, "polyline", {points: places.map((spot) => `${spot.x},${spot.y}`).join(" "), stroke: tone});
        for (const {x: px, y: py, point} of places) {
          if (kind.value === "val") make(svg, "circle", {cx: px, cy: py, r: 3, fill: tone});
          drawn.push({x: px, y: py, text: `${record.name}, ${run.title}: step ${point[1]}, ${point[0].toFixed(1)} s, ` +
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
    for (const control of [axis, kind, ...boxes]) control.addEventListener("input", draw);
    window.addEventListener("resize", draw);
    draw();
  };

  const data = JSON.parse(document.getElementById("data").textContent);
  for (const place of document.querySelectorAll(".chart")) chart(place, data[place.dataset.track]);
})();
