// node --import cloche-sandbox/register app.mjs
//
// Every request of this process for https://vercel.com/api/ goes to CLOCHE_URL.
// A process that was meant to use Cloche and has no address must not talk to
// Vercel with its tokens instead, so that is an error at once.

import { createFetch } from "./index.js";

const original = globalThis.fetch;
globalThis.fetch = createFetch({ fetch: (input, init) => original(input, init) });

// The SDK takes a token of the three-part form from this variable, and team and
// project out of the token. An opaque one has to be passed in code.
const token = process.env.CLOCHE_TOKEN;
if (process.env.VERCEL_OIDC_TOKEN?.startsWith("clo_")) {
  throw new Error("VERCEL_OIDC_TOKEN has an opaque token; the SDK needs the three-part form: cloche token create --jwt");
}
if (token && !process.env.VERCEL_OIDC_TOKEN && token.split(".").length === 3) {
  process.env.VERCEL_OIDC_TOKEN = token;
}
