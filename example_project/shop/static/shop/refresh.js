"use strict";

// Ask for the changing part of a page each second, for as long as something is still waiting.
for (const section of document.querySelectorAll("[data-refresh]")) {
  const waiting = () => section.querySelector("[data-waiting='yes']") !== null;
  const refresh = async () => {
    if (!document.hidden) {
      try {
        const response = await fetch(section.dataset.refresh);
        if (response.ok) {
          section.innerHTML = await response.text();
        }
      } catch {
        // The server may be restarting; the next round asks again.
      }
    }
    if (waiting()) {
      setTimeout(refresh, 1000);
    }
  };
  if (waiting()) {
    setTimeout(refresh, 700);
  }
}
