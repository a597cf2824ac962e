"use strict";
{
  // Hide traces without the text. Their content was escaped when the page was written.
  const field = document.getElementById("find"), count = document.getElementById("count");
  const traces = [...document.querySelectorAll("details[id]")];
  if (field) {
    field.addEventListener("input", () => {
      const wanted = field.value.toLowerCase();
      for (const trace of traces) trace.hidden = !trace.textContent.toLowerCase().includes(wanted);
      count.textContent = wanted ? `${traces.filter((trace) => !trace.hidden).length} of ${traces.length}` : "";
    });
  }
}
