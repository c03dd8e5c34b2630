"use strict";
// Unpack Plotly and draw the figures, in dark colours if the reader prefers them, in light ones on paper.
(async () => {
  const read = (id) => document.getElementById(id).textContent;
  const dark = JSON.parse(read("dark-colours"));
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 620px)");
  // Plotly's other buttons include one that sends the data of a figure to a server.
  const buttons = [["zoom2d", "pan2d", "resetScale2d", "toImage"]];

  async function loadPlotly() {
    const packed = Uint8Array.from(atob(JSON.parse(read("plotly"))), (character) => character.charCodeAt(0));
    const text = new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    const script = document.createElement("script");
    script.textContent = await text; // the content security policy has its hash
    document.head.append(script);
  }

  // On a phone the names of bars stand above them, and margins and texts are smaller.
  function fitNarrow(layout) {
    layout.font.size = 11;
    layout.margin.l = 56;
    layout.margin.r = 8;
    for (const note of layout.annotations ?? []) note.font = { ...note.font, size: 11 };
    for (const axis of ["yaxis", "yaxis2"]) if (layout[axis]?.title) layout[axis].title.font = { size: 11 };
    if (!layout.meta?.bars) return;
    layout.margin.r = 76;
    layout.margin.l = 8;
    layout.height += 16 * layout.yaxis.ticktext.length;
    layout.yaxis.ticktext.forEach((name, row) => {
      const label = { text: name.replaceAll("<br>", " "), x: 0, y: row - 0.5, xref: "paper", xanchor: "left" };
      layout.annotations.push({ ...label, yanchor: "middle", showarrow: false });
    });
    layout.yaxis.showticklabels = false;
  }

  function draw(onPaper) {
    const recolour = (key, value) => (typeof value === "string" && Object.hasOwn(dark, value) ? dark[value] : value);
    for (const element of document.querySelectorAll("[data-figure]")) {
      const figure = JSON.parse(read(element.dataset.figure), scheme.matches && !onPaper ? recolour : undefined);
      if (onPaper) figure.layout.width = 700; // a portrait page; responsive figures would keep the width of the window
      else if (narrow.matches) fitNarrow(figure.layout);
      const config = { responsive: true, displaylogo: false, showSendToCloud: false, modeBarButtons: buttons };
      Plotly.react(element, figure.data, figure.layout, config);
    }
  }

  await loadPlotly();
  draw(false);
  scheme.addEventListener("change", () => draw(false));
  narrow.addEventListener("change", () => draw(false));
  addEventListener("beforeprint", () => draw(true));
  addEventListener("afterprint", () => draw(false));
})();
