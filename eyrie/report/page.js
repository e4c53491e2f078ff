// Draws every chart of the page and keeps it as wide as its place.
const figures = JSON.parse(document.getElementById("figures").textContent);
figures.forEach((figure, i) => {
  Plotly.newPlot(`chart-${i + 1}`, figure.data, figure.layout, { displayModeBar: false, responsive: true });
});
