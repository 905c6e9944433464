/** The frame around the pages: the router, the bar at the top, and the connection status. */

import { addressOf, BASE, HOME, LOGIN_COMMAND, pageOf } from "./base.js";
import { fill, h, link, say, setAttribute, whenChanged } from "./dom.js";
import { moment, outcomeOf } from "./format.js";
import { plain } from "./plain.js";
import { report } from "./state/api.js";
import { Live } from "./state/live.js";
import { session } from "./state/requests.js";
import { attempt } from "./widgets/dialog.js";
import { experimentBadge } from "./widgets/facts.js";
import { banner, NoticeBox, Notices } from "./widgets/notices.js";
import { enter } from "./pages/enter.js";
import { experiments } from "./pages/experiments.js";
import { jobs } from "./pages/jobs.js";
import { missing } from "./pages/missing.js";
import { overview } from "./pages/overview.js";
import { trials } from "./pages/trials.js";

/** @import { Context, MakePage, Page } from "./pages/page.js" */
/** @import { Outcome } from "./format.js" */
/** @import { Connection } from "./state/connection.js" */

/** @type {{[path: string]: MakePage}} */
const PAGES = { "/oview": overview, "/detail": trials, "/missing": missing, ...(report === null ? { "/experiment": experiments, "/jobs": jobs, "/enter": enter } : {}) };
const NAVIGATION = [["/oview", "Overview", "nav-overview"], ["/detail", "Trials", "nav-trials"],
  ...(report === null ? [["/jobs", "Jobs", "nav-jobs"], ["/experiment", "Experiments", "nav-experiments"]] : [])];
/** @type {{[state in Connection]: string}} */
const CONNECTION_WORDS = { loading: "Connecting…", connecting: "Live", streaming: "Live", polling: "Polling", resting: "Live", silent: "Not connected", locked: "Locked", report: "Report" };
const THEMES = ["system", "light", "dark"];
const THEME_KEY = "trial-keeper-theme";

const live = new Live();
/** @type {Page | null} */
let page = null;
let path = "";

const name = h("span", { class: "name" });
const state = h("span", {});
const connection = h("span", { class: "connection", "data-test": "connection", role: "status" });
const navigation = NAVIGATION.map(([href = "", title, test = ""]) => link(href, { "data-test": test }, title));
// On the server of all experiments, its own list is in place of the one here.
if (HOME !== BASE) navigation.splice(-1, 1, h("a", { href: `${HOME}/all`, "data-test": "nav-all" }, "All experiments"));
const theme = h("button", { type: "button", class: "quiet", "data-test": "theme-switch", click: nextTheme });
const signOut = h("button", { type: "button", class: "quiet", "data-test": "sign-out", click: leave }, "Sign out");
const banners = h("div", { class: "banners", role: "region", "aria-label": "Notices" });
const notices = new Notices(live, drawNotices);
const bannerBox = new NoticeBox(notices, banners, banner);
const main = h("main", { id: "main", tabindex: -1 });
const spoken = h("div", { class: "unseen", role: "status", "aria-live": "polite" });

/** @type {Context} */
const context = { live, announce: (text) => say(spoken, text), go, notices };

/** @param {string} to  a path of PAGES */
function go(to) {
  history.pushState(null, "", addressOf(to));
  route();
}

/**
 * A path of PAGES, if the address has one.
 *
 * @param {{pathname: string, hash: string}} address
 */
function pathOf(address) {
  return pageOf(address)?.split("#")[0] ?? "";
}

/** Show the page of the current address. */
function route() {
  const asked = pathOf(location);
  const wanted = PAGES[asked] === undefined ? "/missing" : asked;
  if (wanted === path && page !== null) {
    page.arrive?.();
    return;
  }
  // On the first page the focus stays at the top, before the links to the pages.
  const isFirst = page === null || path === "/enter";
  page?.close();
  page = null;
  path = wanted;
  navigation.forEach((each) => setAttribute(each, "aria-current", pathOf(each) === path ? "page" : null));
  show();
  drawNotices();
  if (!isFirst) {
    scrollTo(0, 0);
    main.focus({ preventScroll: true });
    context.announce(document.title);
  }
}

/** Show the page once there is data; until then show the reason for the wait. */
function show() {
  const make = PAGES[path];
  if (page !== null || make === undefined) return;
  if (path !== "/enter") {
    if (live.connection === "locked") return fill(main, locked());
    if (live.summary === null) {
      return fill(main, h("div", { class: "page narrow" }, h("p", { class: "empty" }, live.connection === "silent" ? "The manager does not answer. This page retries automatically." : "Loading the experiment…")));
    }
  }
  page = make(context);
  document.title = `${page.title} · ${plain(live.summary?.name || live.summary?.id || "trial-keeper")}`;
  fill(main, h("h1", { class: "unseen" }, page.title), page.element);
  if (live.summary !== null) {
    requestAnimationFrame(() => {
      if (document.documentElement.dataset["ready"] === undefined) performance.mark("usable");
      document.documentElement.dataset["ready"] = "true";
    });
  }
}

async function leave() {
  // Load anew, so that no data stays visible.
  if (await attempt(session.leave)) location.assign(`${BASE}/oview`);
}

function locked() {
  return h("div", { class: "page narrow", "data-test": "locked" }, h("section", { class: "card" },
    h("h1", {}, "This page needs a login link"),
    h("p", {}, "Run ", h("code", {}, LOGIN_COMMAND), " where the experiment was created, and open the link that it prints. It lets in this browser alone."),
    h("p", { class: "muted" }, "After a login in this or another tab, this page continues automatically.")));
}

const drawState = whenChanged((/** @type {Outcome} */ outcome) => fill(state, experimentBadge(outcome)));

live.onNews((news) => {
  const { summary } = live;
  if (summary !== null) {
    say(name, plain(summary.name || summary.id));
    setAttribute(name, "title", `experiment ${summary.id}`);
    drawState(outcomeOf(summary));
  }
  notices.update();
  drawNotices();
  if (page === null) show();
  else page.update?.(news);
});

live.onConnection(() => {
  const now = live.connection;
  say(connection, report === null ? CONNECTION_WORDS[now] : `Report of ${moment(report.madeAt)}`);
  setAttribute(connection, "data-state", now);
  signOut.hidden = now === "loading" || now === "locked" || now === "report";
  notices.update();
  drawNotices();
  if (now === "locked" && page !== null && path !== "/enter") {
    page.close();
    page = null;
  }
  if (page === null) show();
});

/** The overview shows problems with all of their text; the other pages show them in the bar. */
function drawNotices() {
  bannerBox.draw(notices.shown.filter(({ kind }) => kind !== "problem" || path !== "/oview"));
  page?.notice?.();
}

/** @returns {string} */
function chosenTheme() {
  return document.documentElement.dataset["theme"] ?? "system";
}

function nextTheme() {
  const following = THEMES[(THEMES.indexOf(chosenTheme()) + 1) % THEMES.length] ?? "system";
  if (following === "system") delete document.documentElement.dataset["theme"];
  else document.documentElement.dataset["theme"] = following;
  try {
    localStorage.setItem(THEME_KEY, following);
  } catch {
    // Storage may be forbidden; then the choice applies until the page is closed.
  }
  tellTheme();
}

function tellTheme() {
  fill(theme, h("span", { class: "roomy" }, "Theme: "), chosenTheme());
  setAttribute(theme, "aria-label", `Theme: ${chosenTheme()}`);
  dispatchEvent(new Event("themechange"));
}

document.body.append(
  h("a", { href: "#main", class: "skip", click: (/** @type {Event} */ event) => {
    event.preventDefault();
    main.focus();
  } }, "Skip to the content"),
  h("div", { class: "top" },
    h("header", { "data-test": "app" },
      h("div", { class: "brand" }, name, state),
      h("nav", { "aria-label": "Pages" }, navigation),
      h("div", { class: "status" }, connection, theme, signOut)),
    banners),
  main, spoken);
signOut.hidden = true;

addEventListener("popstate", route);
document.addEventListener("click", (event) => {
  const anchor = event.target instanceof Element ? event.target.closest("a") : null;
  const isPlain = event.button === 0 && !event.ctrlKey && !event.metaKey && !event.shiftKey && !event.altKey;
  if (anchor === null || !isPlain || event.defaultPrevented || anchor.target === "_blank" || anchor.origin !== location.origin) return;
  if (PAGES[pathOf(anchor)] === undefined) return;
  event.preventDefault();
  go(pageOf(anchor) ?? "");
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tellTheme);

tellTheme();
route();
// The login page sends no requests before it has a session.
if (path !== "/enter") live.start();
