/** The server's routes, as the page uses them. */
import { loadKey } from "./storage";

export interface Blocks {
  used: number;
  cached: number;
  free: number;
}

/** at, step, seconds, tokens, generated, running, waiting, blocks in use */
export type Step = [number, number, number, number, number, number, number, number];

export interface ModelState {
  name: string;
  state: string;
  bytes: number;
  error?: string;
  steps: Step[];
  max_len?: number;
  max_rows?: number;
  step_tokens?: number;
  block_size?: number;
  blocks?: number;
}

export interface LiveRequest {
  id: string;
  model: string;
  key?: string;
  phase: string;
  seconds: number;
  first_token: number | null;
  prompt_tokens: number;
  cached_tokens: number | null;
  generated_tokens: number;
  max_tokens: number;
  route?: string;
}

export interface EndedRequest {
  id: string;
  model: string;
  key?: string;
  ended: number;
  reason: string;
  seconds: number;
  first_token: number | null;
  between_tokens: number | null;
  prompt_tokens: number;
  cached_tokens: number;
  generated_tokens: number;
  queue?: number;
  prefill?: number;
  decode?: number;
  waited?: Record<string, number>;
  loading?: number;
  preemptions?: number;
  recomputed_tokens?: number;
  route?: string;
}

export interface Replica {
  name: string;
  state: string;
  queued_tokens: number;
  running: number;
  waiting: number;
  kv_blocks: Blocks;
  generated_tokens: number;
  routed_requests: number;
  promised_tokens: number;
  reused_tokens: number;
  restarts: number;
}

export interface EngineView {
  version: string;
  time: number;
  stats: {
    running: number;
    waiting: number;
    steps: number;
    busy_seconds: number;
    prompt_tokens: number;
    cached_tokens: number;
    generated_tokens: number;
    computed_tokens: number;
    preemptions: number;
    kv_blocks: Blocks;
    reused_tokens: Record<string, number>;
    host_blocks: number;
    host_places: number;
    disk_blocks: number;
    drafted_tokens: number;
    accepted_tokens: number;
  };
  latency: { first_token: number | null; between_tokens: number | null };
  models: ModelState[];
  requests: LiveRequest[];
  ended: EndedRequest[];
  replicas: Replica[];
  engines: { name: string; kind: string; state: string; models: string[]; in_flight: number; reason?: string }[];
}

/** The server wants a key, or another one. */
export class KeyWanted extends Error {}

function headers(): Record<string, string> {
  const key = loadKey();
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function checked(response: Response): Promise<Response> {
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  const message = told?.error?.message ?? told?.error ?? response.statusText;
  throw response.status === 401 ? new KeyWanted(message) : new Error(message);
}

export async function get<T>(path: string): Promise<T> {
  return (await checked(await fetch(path, { headers: headers() }))).json();
}

export async function post(path: string, body: unknown, signal?: AbortSignal, explain = false): Promise<Response> {
  const sent = { "content-type": "application/json", ...headers(), ...(explain && { "x-penstock-explain": "1" }) };
  return checked(await fetch(path, { method: "POST", headers: sent, body: JSON.stringify(body), signal }));
}

export async function* events(response: Response): AsyncGenerator<any> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop()!;
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}
