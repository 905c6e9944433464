/** The parts of a report that are embedded in its file: compressed, in elements that no browser shows or runs. */

/**
 * @param {string} id  of the element
 * @returns {Promise<string>}
 */
export async function textOf(id) {
  const element = document.getElementById(id);
  if (element === null) throw new Error(`The report has no ${id}.`);
  const bytes = Uint8Array.from(atob(element.textContent ?? ""), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(unpacked).text();
}
