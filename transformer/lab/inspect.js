const shade = w => {  // from white to #0072b2
  const t = Math.sqrt(w);
  return [255 - 255 * t, 255 - 141 * t, 255 - 77 * t];
};
const piece = s => s.replace(/\n/g, '\u21b5').replace(/^ *$/, '\u2581');
document.querySelectorAll('section.map').forEach(section => {
  const map = JSON.parse(section.querySelector('script').textContent);
  const [L, N, T, S] = map.shape, bytes = Uint8Array.from(atob(map.weights), c => c.charCodeAt(0));
  const at = (l, n, t, s) => bytes[((l * N + n) * T + t) * S + s] / 255;
  const grid = section.querySelector('.heads'), large = section.querySelector('.large canvas');
  const caption = section.querySelector('.caption');
  grid.style.gridTemplateColumns = `auto repeat(${N}, minmax(0, 5rem))`;
  const paint = (canvas, l, n) => {
    canvas.width = S; canvas.height = T;
    const context = canvas.getContext('2d'), image = context.createImageData(S, T);
    for (let t = 0; t < T; t++) for (let s = 0; s < S; s++)
      image.data.set([...shade(at(l, n, t, s)), 255], 4 * (t * S + s));
    context.putImageData(image, 0, 0);
  };
  let now = [0, 0];
  const enlarge = (l, n) => {
    now = [l, n];
    const press = b => b.setAttribute('aria-pressed', b.dataset.at == `${l},${n}`);
    grid.querySelectorAll('button').forEach(press);
    const ratio = devicePixelRatio || 1;
    const longest = pieces => Math.min(12, Math.max(...pieces.map(p => p.length))) * 7 + 12;
    const left = longest(map.queries), top = longest(map.keys) * .87;
    const room = Math.min(640 / T, 640 / S, (section.clientWidth - left - 60) / S);  // fits a phone
    const cell = Math.max(5, Math.min(26, Math.floor(room)));
    large.width = (left + S * cell + 60) * ratio; large.height = (top + T * cell + 4) * ratio;
    large.style.width = large.width / ratio + 'px';
    large.style.height = large.height / ratio + 'px';
    const c = large.getContext('2d');
    c.scale(ratio, ratio); c.font = `${Math.min(12, cell + 2)}px system-ui, sans-serif`;
    c.fillStyle = '#1a1a1a'; c.textBaseline = 'middle';
    for (let t = 0; t < T; t++) {
      c.textAlign = 'right';
      c.fillText(piece(map.queries[t]), left - 6, top + (t + .5) * cell, left - 8);
    }
    for (let s = 0; s < S; s++) {
      c.save(); c.translate(left + (s + .5) * cell, top - 6); c.rotate(-Math.PI / 3);
      c.textAlign = 'left'; c.fillText(piece(map.keys[s]), 0, 0, top); c.restore();
    }
    for (let t = 0; t < T; t++) for (let s = 0; s < S; s++) {
      c.fillStyle = `rgb(${shade(at(l, n, t, s)).join()})`;
      c.fillRect(left + s * cell, top + t * cell, cell, cell);
    }
    c.strokeStyle = '#ccc'; c.strokeRect(left, top, S * cell, T * cell);
    const head = `layer ${map.layers[l]}, head ${n}`;
    caption.textContent =
      `${head}. Rows: queries; columns: keys. Hover over a cell for its weight.`;
    large.onmousemove = e => {
      const s = Math.floor((e.offsetX - left) / cell), t = Math.floor((e.offsetY - top) / cell);
      if (s >= 0 && s < S && t >= 0 && t < T) {
        const query = piece(map.queries[t]), key = piece(map.keys[s]);
        const weight = at(l, n, t, s).toFixed(2);
        caption.textContent = `${head}: ${query} attends to ${key} with weight ${weight}`;
      }
    };
  };
  for (let l = 0; l < L; l++) {
    const side = document.createElement('div');
    side.className = 'side'; side.textContent = `layer ${map.layers[l]}`; grid.append(side);
    for (let n = 0; n < N; n++) {
      const button = document.createElement('button'), canvas = document.createElement('canvas');
      button.dataset.at = `${l},${n}`; button.onclick = () => enlarge(l, n);
      button.title = button.ariaLabel = `layer ${map.layers[l]}, head ${n}`;
      paint(canvas, l, n); button.append(canvas); grid.append(button);
    }
  }
  enlarge(...now);
  addEventListener('resize', () => enlarge(...now));
});
