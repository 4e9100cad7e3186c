// What the theme's pages lack for readers that use a keyboard or a screen reader.
document.addEventListener("DOMContentLoaded", () => {
  for (const box of document.querySelectorAll("pre, article table")) {
    box.tabIndex = 0; // It may scroll.
  }
  for (const caption of document.querySelectorAll(".caption[role=heading]")) {
    caption.setAttribute("aria-level", "2");
  }
  document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "Pages");
  document.querySelector(".toc-drawer")?.setAttribute("aria-label", "On this page");
});
