"use strict";
// Draw the figures, in dark colours if the reader prefers them, in light ones on paper.
(() => {
  const read = (id) => document.getElementById(id).textContent;
  const dark = JSON.parse(read("dark-colours"));
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  // Plotly's other buttons include one that sends the data of a figure to a server.
  const buttons = [["zoom2d", "pan2d", "resetScale2d", "toImage"]];
  const config = { responsive: true, displaylogo: false, showSendToCloud: false, modeBarButtons: buttons };

  function draw(onPaper) {
    const recolour = (key, value) => (typeof value === "string" && Object.hasOwn(dark, value) ? dark[value] : value);
    for (const element of document.querySelectorAll("[data-figure]")) {
      const figure = JSON.parse(read(element.dataset.figure), scheme.matches && !onPaper ? recolour : undefined);
      if (onPaper) figure.layout.width = 700; // a portrait page; responsive figures would keep the width of the window
      Plotly.react(element, figure.data, figure.layout, config);
    }
  }

  draw(false);
  scheme.addEventListener("change", () => draw(false));
  addEventListener("beforeprint", () => draw(true));
  addEventListener("afterprint", () => draw(false));
})();
