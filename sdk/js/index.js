// Points an unmodified @vercel/sandbox at a Cloche server. The SDK has no
// option for its server: it calls https://vercel.com/api/…, through a fetch
// that it lets callers replace. So everything here is a fetch.

import { createRequire } from "node:module";
import { join } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";

const VERCEL = "https://vercel.com/api/";

/** @type {import("./index.d.ts").createFetch} */
export function createFetch({ url, token, fetch: inner } = {}) {
  const base = serverURL(url ?? process.env.CLOCHE_URL);
  return async (input, init) => {
    const target = rewrite(input, base);
    if (target === undefined) return (inner ?? globalThis.fetch)(input, init);
    // Before the first await: the SDK is on the stack.
    const sdk = callingSDK();
    if (sdk !== undefined) await patchSDK(sdk);
    if (token !== undefined) {
      const headers = new Headers(init?.headers ?? input.headers);
      headers.set("authorization", `Bearer ${token}`);
      init = { ...init, headers };
    }
    // A Request is kept as the source of method, body and signal. The SDK's
    // dispatcher, in init, is passed on as it is.
    if (input instanceof Request) return (inner ?? globalThis.fetch)(new Request(target, input), init);
    return (inner ?? globalThis.fetch)(target, init);
  };
}

/** @type {import("./index.d.ts").fetch} */
export const fetch = (input, init) => createFetch()(input, init);

/** @type {import("./index.d.ts").patchDomain} */
export function patchDomain(...classes) {
  for (const c of classes) {
    const original = c?.prototype?.domain;
    if (typeof original !== "function") throw new TypeError("patchDomain: pass Session, or the Sandbox class of version 1");
    if (original[patched]) continue;
    const domain = function (port) {
      // Whatever the server says; without a route the original explains.
      const url = this.routes?.find((route) => route.port == port)?.url;
      return url ? url.replace(/\/+$/, "") : original.call(this, port);
    };
    domain[patched] = true;
    c.prototype.domain = domain;
  }
}

const patched = Symbol.for("cloche-sandbox.domain");

/** The server's URL without a slash at its end. */
function serverURL(url) {
  if (!url) {
    throw new Error("cloche-sandbox: CLOCHE_URL is not set. Set it to the address of your Cloche server, for example CLOCHE_URL=http://127.0.0.1:4180");
  }
  let parsed;
  try {
    parsed = new URL(url);
  } catch {
    // below
  }
  if (parsed?.protocol !== "http:" && parsed?.protocol !== "https:") {
    throw new Error(`cloche-sandbox: CLOCHE_URL is ${JSON.stringify(String(url))}, which is not an http:// or https:// address`);
  }
  return (parsed.origin + parsed.pathname).replace(/\/+$/, "");
}

/** Where a request for Vercel's API goes instead; undefined for any other. */
function rewrite(input, base) {
  const url = typeof input === "string" ? input : input instanceof URL ? input.href : input?.url;
  if (typeof url !== "string" || !url.startsWith(VERCEL)) return undefined;
  return `${base}/api/${url.slice(VERCEL.length)}`;
}

/**
 * The main file of the copy of the SDK that is calling, or undefined. An
 * application may have several copies, and each has two builds with classes of
 * their own, so the stack is the only one to know which is in use. File names
 * are taken as they are, not through source maps.
 */
function callingSDK() {
  const { prepareStackTrace, stackTraceLimit } = Error;
  try {
    Error.stackTraceLimit = 20;
    Error.prepareStackTrace = (_, sites) => sites.map((site) => site.getFileName());
    const files = new Error().stack;
    for (const file of Array.isArray(files) ? files : []) {
      const match = file?.match(/^(.*[\\/]@vercel[\\/]sandbox[\\/]dist)[\\/].*\.(c?js)$/);
      if (match) return { dist: match[1], build: match[2] };
    }
    return undefined;
  } finally {
    Error.stackTraceLimit = stackTraceLimit;
    Error.prepareStackTrace = prepareStackTrace;
  }
}

const done = new Set();

/** Patches domain() in one build of one copy. It is loaded already: no cost. */
async function patchSDK({ dist, build }) {
  const key = `${dist} ${build}`;
  if (done.has(key)) return;
  done.add(key);
  try {
    const path = dist.startsWith("file:") ? fileURLToPath(dist) : dist;
    const main = join(path, `index.${build}`);
    const sdk = build === "cjs" ? createRequire(main)(main) : await import(pathToFileURL(main).href);
    patchDomain(sdk.Session ?? sdk.Sandbox); // version 1 has no Session
  } catch (err) {
    // Everything else works without it.
    process.emitWarning(`domain() of ${dist} could not be fixed, use the url of sandbox.routes: ${err}`, "ClocheWarning");
  }
}
