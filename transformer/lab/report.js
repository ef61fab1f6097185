document.querySelectorAll('.plot').forEach(plot => {  // a click or Enter enlarges a figure
  plot.tabIndex = 0; plot.title = 'Click to enlarge';
  plot.onclick = () => plot.classList.toggle('large');
  plot.onkeydown = e => { if (e.key == 'Enter') plot.onclick(); };
});
document.addEventListener('keydown', e => {
  if (e.key == 'Escape') document.querySelectorAll('.large').forEach(p => p.classList.remove('large'));
});
addEventListener('beforeprint', () => {  // print collapsed figures and tables, too
  document.querySelectorAll('details').forEach(d => { d.open = true; });
});
