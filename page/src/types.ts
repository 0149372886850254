/** What a conversation is made of. */

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export interface TextFile {
  name: string;
  text: string;
}

export interface Picture {
  name: string;
  url: string; // a data: URL
}

export interface TokenChance {
  token: string;
  logprob: number;
  top: { token: string; logprob: number }[];
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens?: number };
}

/** The part of the server's `penstock` object that is shown. */
export interface Report {
  ignored_fields?: string[];
  loading_seconds?: number;
  resumed_on?: string[];
  route?: string[];
  loops?: { phrase_tokens: number }[];
  choices?: {
    finish: { reason: string; by: string };
    cache?: { prompt_tokens: number; reused_tokens: number; miss?: { reason: string; message: string } | null };
    seconds?: Record<string, number>;
    preemptions?: number;
    recomputed_tokens?: number;
    drafts?: { source: string; drafted_tokens: number; accepted_tokens: number }[];
  }[];
}

export interface Message {
  id: string;
  parent: string | null;
  role: "user" | "assistant" | "tool";
  content: string;
  created: number;
  files?: TextFile[];
  pictures?: Picture[];
  model?: string;
  reasoning?: string;
  calls?: ToolCall[];
  callId?: string; // the call that a tool's message answers
  chances?: TokenChance[];
  usage?: Usage;
  report?: Report;
  firstMs?: number;
  totalMs?: number;
  finish?: string; // as the server says it; "repetition": the loop guard ended it; "stopped": the reader did
  error?: string;
}

export interface Chat {
  id: string;
  title: string;
  created: number;
  updated: number;
  system: string;
  messages: Record<string, Message>;
  chosen: Record<string, string>; // the branch that is shown below each message, and below ROOT
}

export interface Settings {
  system: string;
  temperature: string;
  top_p: string;
  top_k: string;
  min_p: string;
  repetition_penalty: string;
  seed: string;
  max_tokens: string;
  schema: string;
  tools: string;
  extra: string;
  chances: boolean;
}

export interface Preset {
  name: string;
  settings: Partial<Settings>;
}
