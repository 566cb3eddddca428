// Draws the page's chart from its Vega-Lite specification, in the scheme that the reader's system has chosen.
// Expressions are interpreted (`ast`), not compiled, and no style element is added: the pages forbid both.
// Where drawing fails, the image that the server makes from the same specification takes its place.

const figure = document.querySelector("[data-chart]");
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const options = {
  ast: true,
  actions: false,
  defaultStyle: false,
  mode: "vega-lite",
  renderer: "svg",
  tooltip: { disableDefaultStyle: true },
};

function showImage() {
  const image = new Image();
  image.src = figure.dataset.image;
  image.alt = figure.dataset.description;
  figure.replaceChildren(image);
}

async function draw() {
  const theme = dark.matches ? "dark" : "light";
  const response = await fetch(`${figure.dataset.chart}?theme=${theme}`);
  if (!response.ok) throw new Error(`the chart's specification answered ${response.status}`);
  await window.vegaEmbed(figure, await response.json(), options);
}

function drawOrShowImage() {
  draw().catch(showImage);
}

dark.addEventListener("change", drawOrShowImage);
drawOrShowImage();
