// Talks to the server: the key, OpenAI's error objects, server-sent events.

const KEY = "etserve-key";

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** GET, or POST when there is a body. Throws ApiError with what the server said. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) };
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.", 0, "unreachable");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const fallback = { message: `The server answered ${response.status}.`, code: null };
  const { message, code } = await response.json().then((body) => body.error, () => fallback);
  return new ApiError(message, response.status, code);
}

/** Yield {name, data} of each event, data parsed; "[DONE]" as it is. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (pending + value).split("\n\n");
    pending = blocks.pop();
    for (const block of blocks) {
      const event = parse(block);
      if (event) yield event;
    }
  }
}

function parse(block) {
  let name = "message";
  let data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (!data) return null; // a comment
  return { name, data: data === "[DONE]" ? data : JSON.parse(data) };
}
