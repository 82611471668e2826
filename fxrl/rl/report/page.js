// Beside each chart's legend: the numbers of the step under the pointer, else of the last one.
for (const svg of document.querySelectorAll("svg[data-read]")) {
  const lines = JSON.parse(svg.dataset.read), rule = svg.querySelector(".read");
  const told = svg.closest("figure").querySelector(".told");
  const nearest = (points, x) => points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
  const show = (x) => {
    const [at, step] = nearest(lines.map((line) => nearest(line.at, x)), x);
    const read = lines.flatMap(({ name, at }) => at.filter((p) => p[1] === step).map((p) => `${name} ${p[2]}`));
    told.textContent = `step ${step}: ${read.join(", ")}`;
    return at;
  };
  const follow = (event) => {
    const box = svg.getBoundingClientRect(), { width, height } = svg.viewBox.baseVal;
    const at = show(((event.clientX - box.left) / box.width) * width);
    rule.setAttribute("d", `M${at} 0V${height}`);
  };
  const leave = () => { rule.setAttribute("d", ""); show(svg.viewBox.baseVal.width); };
  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerdown", follow);
  svg.addEventListener("pointerleave", leave);
  leave();
}
