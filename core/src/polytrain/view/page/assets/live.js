"use strict";
// Follows an active run: fetches the page again, and changes in this one what differs. So zoom,
// focus, scrolling, selected text and opened details stay.
(() => {
  const LIVE = "Live: this page follows the run.";
  const status = document.getElementById("live");
  const time = () => new Date().toLocaleTimeString();

  // Screen readers read it out: it changes only when something has.
  const say = (text, isLost = false) => {
    if (status.textContent !== text) status.textContent = text;
    status.classList.toggle("lost", isLost);
  };

  const keyOf = (node) => (node.nodeType === Node.ELEMENT_NODE ? (node.dataset.key ?? (node.id || node.nodeName)) : node.nodeName);

  const sameAttributes = (old, fresh) => {
    for (const { name } of [...old.attributes])
      if (!fresh.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes)
      if (old.getAttribute(name) !== value && !(name === "open" && old.nodeName === "DETAILS")) old.setAttribute(name, value);
  };

  // Make what is inside an element that of another. Children are matched by `data-key`, `id` or
  // their kind, in order.
  const change = (old, fresh) => {
    const left = [...old.childNodes];
    let place = old.firstChild;
    for (const child of [...fresh.childNodes]) {
      const at = left.findIndex((each) => keyOf(each) === keyOf(child));
      const found = at < 0 ? null : left.splice(at, 1)[0];
      if (found === null) old.insertBefore(document.importNode(child, true), place);
      else {
        if (found === place) place = place.nextSibling;
        else old.insertBefore(found, place);
        if (found.nodeType !== Node.ELEMENT_NODE) {
          if (found.data !== child.data) found.data = child.data;
        } else if (!found.matches(".controls") && !found.isEqualNode(child)) {
          sameAttributes(found, child);
          if (!found.matches(".chart")) change(found, child);
        }
      }
    }
    for (const each of left) each.remove();
  };

  const follow = async () => {
    const wait = Number(document.body.dataset.refresh);
    if (!wait) {
      say("The run is no longer active: this page doesn't change any more.");
      return;
    }
    await new Promise((done) => setTimeout(done, wait * 1000));
    try {
      const answer = await fetch(location.href, { cache: "no-store" });
      const text = await answer.text();
      if (!answer.ok) throw new Error(text.trim());
      const fresh = new DOMParser().parseFromString(text, "text/html");
      document.title = fresh.title;
      document.body.dataset.refresh = fresh.body.dataset.refresh ?? "";
      for (const part of ["header", "main", "footer"]) change(document.querySelector(part), fresh.querySelector(part));
      document.getElementById("facts").textContent = fresh.getElementById("facts").textContent;
      page.update();
      delete status.dataset.since;
      say(LIVE);
    } catch (error) {
      const since = (status.dataset.since ??= time());
      say("Not live since " + since + ", and trying again: " + error.message, true);
    }
    follow();
  };

  say(LIVE);
  follow();
})();
