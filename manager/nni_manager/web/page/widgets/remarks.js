/** The tags and the note of a trial or of the experiment, shown and changed. */

import { fill, h, say, whenChanged } from "../dom.js";
import { plain, short } from "../plain.js";
import { attempt } from "./dialog.js";
import { prose } from "./facts.js";

/** @import { Remarks, RemarksChange } from "../types.js" */

/** The limits of the manager, which checks them. */
const LONGEST_TAG = 64;
const LONGEST_NOTE = 10_000;

/**
 * Tags as small labels; null without tags.
 *
 * @param {readonly string[]} tags
 */
export function tagList(tags) {
  if (tags.length === 0) return null;
  return h("span", { class: "chips" }, tags.map((tag) => h("span", { class: "tag" }, short(tag, LONGEST_TAG))));
}

export class RemarksEditor {
  #note = "";
  #isEdited = false;
  #isReadOnly = true;

  /**
   * @param {(change: RemarksChange) => Promise<Remarks>} send
   * @param {string} commands  shown in a read-only view: what changes tags and note, with commands between backticks
   */
  constructor(send, commands) {
    this.send = send;
    this.tags = h("span", { class: "chips", "data-test": "tags" });
    this.input = h("input", { type: "text", size: 12, maxlength: LONGEST_TAG, placeholder: "a tag", "aria-label": "New tag", "data-test": "new-tag", autocomplete: "off" });
    this.form = h("form", { class: "inline", submit: async (/** @type {Event} */ event) => {
      event.preventDefault();
      const tag = this.input.value.trim();
      if (tag !== "" && (await this.#change({ addTags: [tag] }))) this.input.value = "";
    } }, this.input, h("button", { type: "submit", class: "small", "data-test": "add-tag" }, "Add tag"));
    this.noteBox = h("div", {});
    this.conflict = h("p", { class: "warn-text", role: "status" });
    this.hint = h("p", { class: "muted hint" }, prose(commands));
    this.element = h("section", { class: "remarks", "aria-label": "Tags and note", "data-test": "remarks" },
      h("div", { class: "inline" }, this.tags, this.form), this.noteBox, this.hint);
    this.drawTags = whenChanged((/** @type {{tags: readonly string[], isReadOnly: boolean}} */ { tags, isReadOnly }) => {
      if (isReadOnly) fill(this.tags, tagList(tags));
      else fill(this.tags, tags.map((tag) => h("span", { class: "tag" }, short(tag, LONGEST_TAG), h("button", { type: "button", class: "quiet remove", "aria-label": `Remove tag ${plain(tag)}`,
        click: async () => {
          if (await this.#change({ removeTags: [tag] })) this.input.focus();
        } }, "×"))));
    });
    /** @type {readonly string[]} */
    this.shown = [];
    this.#draw();
  }

  /** @param {boolean} isReadOnly */
  setReadOnly(isReadOnly) {
    if (isReadOnly === this.#isReadOnly) return;
    this.#isReadOnly = isReadOnly;
    this.#draw();
  }

  /** @param {readonly string[]} tags */
  showTags(tags) {
    this.shown = tags;
    this.drawTags({ tags, isReadOnly: this.#isReadOnly });
  }

  /**
   * Show a note. If it is being edited, the field stays as it is, with a warning.
   *
   * @param {string} note
   */
  showNote(note) {
    if (note === this.#note) return;
    this.#note = note;
    if (this.#isEdited) say(this.conflict, "The note has been changed elsewhere meanwhile; Save replaces that note.");
    else this.#drawNote();
  }

  #draw() {
    this.form.hidden = this.#isReadOnly;
    this.hint.hidden = !this.#isReadOnly;
    this.showTags(this.shown);
    if (!this.#isEdited) this.#drawNote();
  }

  #drawNote() {
    const text = this.#note === "" ? null : h("p", { class: "note", "data-test": "note" }, plain(this.#note));
    this.editButton = h("button", { type: "button", class: "small", "data-test": "edit-note", click: () => this.#edit() }, this.#note === "" ? "Add a note" : "Change the note");
    fill(this.noteBox, text, this.#isReadOnly ? null : this.editButton);
  }

  #edit() {
    const field = h("textarea", { rows: 4, maxlength: LONGEST_NOTE, "aria-label": "Note", "data-test": "note-field" });
    field.value = this.#note;
    say(this.conflict, "");
    const form = h("form", { submit: async (/** @type {Event} */ event) => {
      event.preventDefault();
      if (await this.#change({ note: field.value })) this.#endEdit();
    }, keydown: (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Escape") this.#endEdit();
    } }, field, this.conflict, h("div", { class: "buttons" },
      h("button", { type: "submit", class: "small primary", "data-test": "save-note" }, "Save"),
      h("button", { type: "button", class: "small quiet", click: () => this.#endEdit() }, "Cancel")));
    this.#isEdited = true;
    fill(this.noteBox, form);
    field.focus();
  }

  #endEdit() {
    this.#isEdited = false;
    this.#drawNote();
    this.editButton?.focus();
  }

  /** @param {RemarksChange} change */
  async #change(change) {
    return attempt(async () => {
      const { tags, note } = await this.send(change);
      this.showTags(tags);
      this.showNote(note);
    });
  }
}
