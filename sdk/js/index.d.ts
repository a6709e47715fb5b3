/** What `createFetch` needs to know. */
export interface Options {
  /** Address of the Cloche server. Default: `CLOCHE_URL`. */
  url?: string;
  /** Sent in place of the SDK's token, if given. */
  token?: string;
  /** Makes the requests. Default: `globalThis.fetch`, as it is at each call. */
  fetch?: typeof globalThis.fetch;
}

/**
 * Returns a `fetch` for the SDK's `fetch` option. Requests for
 * `https://vercel.com/api/` go to the Cloche server, any other passes
 * unchanged. Throws if there is no address, or none that is http or https.
 */
export declare function createFetch(options?: Options): typeof globalThis.fetch;

/** `createFetch()` with `CLOCHE_URL`, read at each call. */
export declare const fetch: typeof globalThis.fetch;

/**
 * Makes `domain(port)` return the URL that the server gave for the port; the
 * SDK itself always says `https://….vercel.run`. Pass the SDK's `Session` (its
 * `Sandbox` follows), or, for version 1, its `Sandbox`. `createFetch` and
 * `register` do this by themselves; a bundled SDK needs it by hand. Calling it
 * twice does no harm.
 */
export declare function patchDomain(...classes: Array<{ prototype: { domain(port: number): string } }>): void;
