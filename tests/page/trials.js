/** Trials as the manager sends them, with the fields that a test changes. */

/** @param {object} [fields] */
export function aRow(fields = {}) {
  return {
    id: "aB3dE", seq: 0, state: "SUCCEEDED", status: "SUCCEEDED", parameters: {}, value: null, latest: null, count: 0, submit: 0, start: 0,
    end: 1000, reason: "succeeded", exitCode: 0, message: "", attempt: 0, customized: false, ...fields,
  };
}

/** A random number generator with a fixed seed. */
export function seeded(seed) {
  let state = seed;
  return () => {
    state = (state * 1664525 + 1013904223) % 2 ** 32;
    return state / 2 ** 32;
  };
}
