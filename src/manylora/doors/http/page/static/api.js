// Requests to the server, with the user's API key. Paths are relative, since a proxy may add a prefix.

const KEY_ITEM = "manylora-key";
let askForKey = async () => {};
let asking = null;

export const hasKey = () => sessionStorage.getItem(KEY_ITEM) !== null;
export const storeKey = (key) => sessionStorage.setItem(KEY_ITEM, key);
export const onKeyNeeded = (ask) => { askForKey = ask; };

export class ApiProblem extends Error {
  constructor(status, body) {
    super(body?.error?.message ?? `The server answered ${status}`);
    this.status = status;
    this.param = body?.error?.param ?? null;
  }
}

/** Fetch. After a 401, ask for a key, once for all waiting requests, and try again. */
export async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY_ITEM);
    const headers = { ...options.headers };
    if (key !== null) headers.Authorization = `Bearer ${key}`;
    const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    if (response.ok) return response;
    if (response.status !== 401) throw new ApiProblem(response.status, await response.json().catch(() => null));
    if (sessionStorage.getItem(KEY_ITEM) === key) {
      asking ??= askForKey(key !== null).finally(() => { asking = null; });
    }
    await asking;
  }
}

export const getJson = async (path, options) => (await call(path, options)).json();

/** The parsed events of a stream, up to [DONE]. */
export async function* stream(path, body, signal) {
  const response = await call(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The answer broke off");
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiProblem(500, event);
      yield event;
    }
  }
}
