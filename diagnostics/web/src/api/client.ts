// The HTTP API. Addresses are relative to the page, so that the page works behind any proxy path. For an unchanged answer
// (304) the previous object is returned, so that components that depend on it are not drawn again.

import { signal } from "@preact/signals";

import { rootPath } from "../app/place";
import { forget, store, stored } from "../app/storage";
import type { ErrorDocument } from "./documents";

export type Query = Record<string, string | number | boolean | null | undefined>;

/** An error answer of the server, or no answer at all (status 0). */
export class ApiError extends Error {
  readonly status: number;
  /** The machine-readable code, as in ErrorDocument. */
  readonly code: string;

  constructor(status: number, code: string, text: string) {
    super(text);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
  }
}

/** Return an error as an ApiError; any other error becomes one with status 0 (no answer). */
export function asApiError(error: unknown): ApiError {
  return error instanceof ApiError ? error : new ApiError(0, "unavailable", String(error));
}

/** The server requires authentication. Set by any answer 401, cleared by signing in. */
export const isSignedOut = signal(false);

interface Kept {
  etag: string;
  value: unknown;
}

const NUM_KEPT = 48;
const kept = new Map<string, Kept>();

function keep(url: string, etag: string | null, value: unknown): void {
  kept.delete(url);
  if (etag === null) {
    return;
  }
  kept.set(url, { etag, value });
  for (const oldest of kept.keys()) {
    if (kept.size <= NUM_KEPT) {
      break;
    }
    kept.delete(oldest);
  }
}

/** Drop every cached answer, after a restart of the server or a change of user. */
export function forgetAnswers(): void {
  kept.clear();
}

/** Return the URL of a resource of the API. Null, undefined and empty values are left out. */
export function apiUrl(path: string, query: Query = {}): string {
  const params = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") {
      params.set(name, String(value));
    }
  }
  const text = params.toString();
  const relative = `api/v1/${path}${text === "" ? "" : `?${text}`}`;
  return new URL(relative, document.baseURI).href;
}

async function refusal(response: Response): Promise<ApiError> {
  let body: Partial<ErrorDocument> = {};
  try {
    body = (await response.json()) as Partial<ErrorDocument>;
  } catch {
    // the body is an error page of a proxy, or empty
  }
  const text = typeof body.text === "string" ? body.text : `The server answered ${response.status} ${response.statusText}.`;
  return new ApiError(response.status, typeof body.error === "string" ? body.error : "unavailable", text);
}

// The browser keeps this secret for one origin, which includes the port; it sends cookies to every port of a host.
const SECRET_KEY = `megatrain.session:${rootPath}`;

/** Keep the page secret of a session; null removes it. */
export function keepPageSecret(secret: string | null): void {
  if (secret === null) {
    forget(SECRET_KEY);
  } else {
    store(SECRET_KEY, secret);
  }
}

/** Send a request with the page secret and return the answer. Throws ApiError, or AbortError. */
export async function request(url: string, init: RequestInit): Promise<Response> {
  let response: Response;
  const headers = new Headers(init.headers);
  const secret = stored(SECRET_KEY);
  if (secret !== null) {
    headers.set("X-Megatrain-Session", secret);
  }
  try {
    response = await fetch(url, { credentials: "same-origin", cache: "no-store", ...init, headers });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") {
      throw error;
    }
    throw new ApiError(0, "unavailable", "The dashboard server does not answer. It may be restarting.");
  }
  if (response.status === 401) {
    isSignedOut.value = true;
  }
  if (!response.ok && response.status !== 304) {
    throw await refusal(response);
  }
  return response;
}

async function get(
  url: string,
  accept: string,
  read: (response: Response) => Promise<unknown>,
  signalToStop: AbortSignal | undefined,
): Promise<unknown> {
  const last = kept.get(url);
  const headers: Record<string, string> = { Accept: accept };
  if (last !== undefined) {
    headers["If-None-Match"] = last.etag;
  }
  const response = await request(url, { headers, signal: signalToStop ?? null });
  if (response.status === 304 && last !== undefined) {
    return last.value;
  }
  const value = await read(response);
  keep(url, response.headers.get("ETag"), value);
  return value;
}

/** Read a document. Throws ApiError, or AbortError after signalToStop. */
export async function getJson<T>(path: string, query: Query = {}, signalToStop?: AbortSignal): Promise<T> {
  return (await get(apiUrl(path, query), "application/json", (answer) => answer.json(), signalToStop)) as T;
}

/** Read a container of typed arrays. An unchanged answer returns the same buffer: never write into it, never transfer it. */
export async function getArrays(path: string, query: Query = {}, signalToStop?: AbortSignal): Promise<ArrayBuffer> {
  const accept = "application/x-megatrain-arrays";
  return (await get(apiUrl(path, query), accept, (answer) => answer.arrayBuffer(), signalToStop)) as ArrayBuffer;
}

/** Save an answer as a file, under the name that the server gives it. A link would not send the page secret. */
export async function download(url: string): Promise<void> {
  const response = await request(url, {});
  const name = /filename="?([^";]+)"?/.exec(response.headers.get("Content-Disposition") ?? "")?.[1];
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await response.blob());
  link.download = name ?? new URL(url).pathname.split("/").at(-1) ?? "download";
  link.click();
  URL.revokeObjectURL(link.href);
}

/** Send a body and read the answer; null if it is empty. The server accepts such requests only from its own page. */
export async function send<T>(method: "POST" | "DELETE", path: string, body?: unknown): Promise<T | null> {
  const response = await request(apiUrl(path), {
    method,
    headers: { "Accept": "application/json", "Content-Type": "application/json", "X-Megatrain-Request": "1" },
    body: body === undefined ? null : JSON.stringify(body),
  });
  const text = await response.text();
  return text === "" ? null : (JSON.parse(text) as T);
}
