"use strict";
// What the page can do besides: values under the pointer, smoothing, and the age of the page.
// Everything is there without it.
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const svgName = "http://www.w3.org/2000/svg";
  document.documentElement.classList.add("script");

  // The same edges as in drawing.py.
  const [left, right, top, bottom] = [62, 16, 14, 30];

  const scaleOf = (svg) => {
    const [width, height] = svg.getAttribute("viewBox").split(" ").slice(2).map(Number);
    const [x0, x1] = svg.dataset.x.split(" ").map(Number);
    const log = svg.classList.contains("log");
    const turn = log ? Math.log10 : (value) => value;
    const [y0, y1] = svg.dataset.y.split(" ").map(Number).map(turn);
    const across = width - left - right, down = height - top - bottom;
    return {
      x: (step) => left + ((step - x0) / (x1 - x0)) * across,
      y: (value) => top + (1 - (turn(value) - y0) / (y1 - y0)) * down,
      step: (x) => x0 + ((x - left) / across) * (x1 - x0),
      shows: (value) => typeof value === "number" && (value > 0 || !log),
      height,
    };
  };

  const spell = (value) => {
    if (typeof value !== "number") return value;
    const size = Math.abs(value);
    if (size < 1e5 && (size >= 1e3 || Number.isInteger(value))) return Math.round(value).toLocaleString("en");
    for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (size >= 1e5 && size < 1e12 && size >= unit) return Number((value / unit).toPrecision(4)) + name;
    }
    if (size && (size < 1e-4 || size >= 1e5)) return value.toExponential(3).replace("e+", "e");
    return String(Number(value.toPrecision(4)));
  };

  const nearest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1; else high = middle;
    }
    return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
  };

  const cell = (name, text) => {
    const element = document.createElement(name);
    element.textContent = text;
    return element;
  };

  const mark = (svg, name, shape) => {
    const path = document.createElementNS(svgName, "path");
    path.setAttribute("class", `${name} mark`);
    path.setAttribute("d", shape);
    svg.append(path);
  };

  const forget = (svg) => {
    for (const one of svg.querySelectorAll(".mark")) one.remove();
    tip.hidden = true;
  };

  const show = (svg, lines, step) => {
    forget(svg);
    const found = lines.filter((line) => line[3].length).map((line) => {
      const at = nearest(line[3], step);
      return { label: line[0], style: line[1], step: line[3][at], value: line[4][at] };
    });
    if (!found.length) return;
    const gap = (one) => Math.abs(one.step - step);
    const at = found.reduce((one, other) => (gap(other) < gap(one) ? other : one)).step;
    const scale = scaleOf(svg), x = scale.x(at).toFixed(1);
    mark(svg, "cross", `M${x} ${top}V${scale.height - bottom}`);
    const rows = [cell("b", `step ${at.toLocaleString("en")}`)];
    for (const one of found) {
      const row = document.createElement("div");
      const where = one.step === at ? "" : ` at ${one.step.toLocaleString("en")}`;
      row.append(cell("span", one.label + where), cell("b", spell(one.value)));
      rows.push(row);
      if (scale.shows(one.value)) {
        const [a, b] = [scale.x(one.step), scale.y(one.value)];
        mark(svg, `dots s${one.style}`, `M${a.toFixed(1)} ${b.toFixed(1)}h0`);
      }
    }
    tip.replaceChildren(...rows);
    tip.hidden = false;
    const box = svg.getBoundingClientRect(), middle = box.left + (x / svg.viewBox.baseVal.width) * box.width;
    const wide = document.documentElement.clientWidth;
    const beside = middle + 14 + tip.offsetWidth < wide ? middle + 14 : middle - 14 - tip.offsetWidth;
    tip.style.left = `${Math.max(4, beside) + scrollX}px`;
    tip.style.top = `${box.top + scrollY + 12}px`;
    svg.dataset.at = at;
  };

  const stepAlong = (svg, lines, way) => {
    const steps = [...new Set(lines.flatMap((line) => line[3]))].sort((a, b) => a - b);
    if (!steps.length) return;
    const now = svg.dataset.at === undefined ? steps.length - 1 - way : nearest(steps, Number(svg.dataset.at));
    show(svg, lines, steps[Math.min(steps.length - 1, Math.max(0, now + way))]);
  };

  for (const figure of document.querySelectorAll("figure.chart")) {
    const lines = charts[figure.dataset.chart];
    for (const svg of figure.querySelectorAll(":scope > svg")) {
      const point = (event) => {
        const box = svg.getBoundingClientRect();
        const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
        show(svg, lines, scaleOf(svg).step(x));
      };
      svg.addEventListener("pointermove", point);
      svg.addEventListener("pointerdown", point);
      svg.addEventListener("pointerleave", () => forget(svg));
      svg.addEventListener("blur", () => forget(svg));
      svg.addEventListener("keydown", (event) => {
        const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (way) { event.preventDefault(); stepAlong(svg, lines, way); }
      });
    }
  }

  // An average over the points that are drawn, each weighing less the longer ago it was.
  const smoothed = (values, weight) => {
    let sum = 0, total = 0;
    return values.map((value) => {
      if (typeof value !== "number") return value;
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  };

  const pathOf = (steps, values, scale) => {
    let text = "", count = 0;
    values.forEach((value, at) => {
      if (!scale.shows(value)) { text += count === 1 ? "h0" : ""; count = 0; return; }
      count += 1;
      text += `${count === 1 ? "M" : "L"}${scale.x(steps[at]).toFixed(1)} ${scale.y(value).toFixed(1)}`;
    });
    return text + (count === 1 ? "h0" : "");
  };

  const smooth = (weight) => {
    for (const svg of document.querySelectorAll("figure.chart > svg")) {
      for (const one of svg.querySelectorAll(".smooth")) one.remove();
      const lines = charts[svg.parentElement.dataset.chart], scale = scaleOf(svg);
      for (const path of svg.querySelectorAll("path[data-line]")) {
        const [, style, dotted, steps, values] = lines[path.dataset.line];
        path.classList.toggle("raw", weight > 0 && !dotted);
        if (!weight || dotted) continue;
        const over = document.createElementNS(svgName, "path");
        over.setAttribute("class", `line smooth s${style}`);
        over.setAttribute("d", pathOf(steps, smoothed(values, weight), scale));
        path.after(over);
      }
    }
  };

  // A page that loads itself anew keeps what was chosen on it.
  const keep = (name, value) => {
    try {
      if (value === undefined) return sessionStorage.getItem(location.pathname + name);
      sessionStorage.setItem(location.pathname + name, value);
    } catch { /* not allowed here */ }
    return null;
  };

  const log = document.getElementById("log"), slider = document.getElementById("smooth");
  if (log && slider) {
    const apply = () => {
      document.getElementById("smoothed").textContent = slider.value;
      smooth(Number(slider.value));
    };
    log.checked = keep("log") === "yes";
    slider.value = keep("smooth") ?? "0";
    log.addEventListener("change", () => keep("log", log.checked ? "yes" : "no"));
    slider.addEventListener("input", () => { keep("smooth", slider.value); apply(); });
    slider.form.addEventListener("submit", (event) => event.preventDefault());
    apply();
  }

  const written = new Date(document.querySelector("footer time").dateTime);
  const age = () => {
    const minutes = Math.floor((Date.now() - written) / 60000);
    document.getElementById("age").textContent = minutes < 1 ? "" : minutes < 120
      ? `(${minutes} min ago)` : `(${Math.floor(minutes / 60)} h ago)`;
  };
  age();
  setInterval(age, 30000);
})();
