/** Sends a conversation and reads the answer as it comes. */
import { events, KeyWanted, post } from "./api";
import { answeringIn, changed, change, keep, state } from "./state";
import { add, path, pathTo, siblings } from "./tree";
import type { Chat, Message, Settings, ToolCall } from "./types";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"] as const;
const ALTERNATIVES = 5;

/** Returns a message as the API takes it. */
function sent(message: Message): Record<string, unknown> {
  const files = (message.files ?? []).map(file => `File: ${file.name}\n\`\`\`\n${file.text}\n\`\`\``);
  const text = [...files, message.content].filter(Boolean).join("\n\n");
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: text };
  if (message.role === "assistant") {
    const calls = message.calls?.map(call => ({
      id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
    }));
    return { role: "assistant", content: text, ...(calls && { tool_calls: calls }) };
  }
  if (!message.pictures?.length) return { role: "user", content: text };
  const pictures = message.pictures.map(each => ({ type: "image_url", image_url: { url: each.url } }));
  return { role: "user", content: [...pictures, { type: "text", text }] };
}

function json(text: string, what: string): any {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} in the settings is not JSON: ${(error as Error).message}`);
  }
}

function request(chat: Chat, messages: Message[], settings: Settings, chances: boolean): Record<string, unknown> {
  const body: Record<string, unknown> = {
    model: state.model, stream: true, stream_options: { include_usage: true }, messages: messages.map(sent),
  };
  if (chat.system.trim()) (body.messages as unknown[]).unshift({ role: "system", content: chat.system });
  for (const name of NUMBERS) if (settings[name].trim() !== "") body[name] = Number(settings[name]);
  if (settings.schema.trim()) {
    const schema = json(settings.schema, "The JSON schema");
    body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  }
  if (settings.tools.trim()) body.tools = json(settings.tools, "The list of tools");
  if (chances) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
  if (settings.extra.trim()) Object.assign(body, json(settings.extra, "The field for extra request fields"));
  return body;
}

/** Returns whether the loop guard ended a choice: a stop string of that name ends it with "stop". */
const looped = (choice: any): boolean => choice.finish_reason === "length" && choice.stop_reason === "repetition";

/** Adds what one event tells to the answer. */
function take(answer: Message, event: any): void {
  if (event.error) throw new Error(event.error.message);
  answer.usage = event.usage ?? answer.usage;
  answer.report = event.penstock ?? answer.report;
  const choice = event.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? {};
  if (delta.reasoning_content) answer.reasoning = (answer.reasoning ?? "") + delta.reasoning_content;
  if (delta.content) answer.content += delta.content;
  for (const part of delta.tool_calls ?? []) takeCall((answer.calls ??= []), part);
  for (const each of choice.logprobs?.content ?? []) {
    (answer.chances ??= []).push({ token: each.token, logprob: each.logprob, top: each.top_logprobs ?? [] });
  }
  if (choice.finish_reason) answer.finish = looped(choice) ? "repetition" : choice.finish_reason;
}

function takeCall(calls: ToolCall[], part: any): void {
  const call = (calls[part.index ?? calls.length] ??= { id: "", name: "", arguments: "" });
  call.id ||= part.id ?? "";
  call.name += part.function?.name ?? "";
  call.arguments += part.function?.arguments ?? "";
}

export interface Options {
  chances?: boolean; // with token probabilities
  loops?: boolean; // it may repeat itself without end
}

/** Has an answer made below a message, or continues one that has begun. */
export async function generate(chat: Chat, parent: Message, options: Options & { more?: Message } = {}) {
  if (answeringIn(chat)) return;
  const chances = options.chances ?? state.settings.chances;
  const answer = options.more ?? add(chat, { parent: parent.id, role: "assistant", content: "", model: state.model });
  const stop = new AbortController();
  const began = performance.now();
  delete answer.finish;
  delete answer.error;
  state.answering.set(chat.id, { message: answer.id, stop });
  change({ spoken: "Answering" });
  try {
    const body = request(chat, pathTo(chat, options.more ? answer.id : parent.id), state.settings, chances);
    if (options.loops) body.loop_guard = false;
    if (options.more) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    const response = await post("v1/chat/completions", body, stop.signal, true);
    let first = 0;
    for await (const event of events(response)) {
      take(answer, event);
      if (!first && event.choices?.[0]?.delta && (answer.content || answer.reasoning || answer.calls)) {
        first = performance.now();
        answer.firstMs = Math.round(first - began);
      }
      changed();
    }
    answer.finish ??= "stop";
  } catch (error) {
    fail(answer, error as Error);
  }
  answer.totalMs = Math.round(performance.now() - began);
  chat.updated = Date.now();
  if (state.chats.includes(chat)) keep(chat); // it may have been deleted meanwhile
  state.answering.delete(chat.id);
  change({ spoken: answer.finish === "stopped" ? "Stopped" : answer.error ? "" : "Answer complete" });
}

function fail(answer: Message, error: Error): void {
  if (error.name === "AbortError") answer.finish = "stopped";
  else answer.error = error.message || "the server does not answer";
  if (error instanceof KeyWanted) change({ keyWanted: error.message });
}

/** Stops the answer of the open chat. */
export function stop(): void {
  answeringIn(state.chat)?.stop.abort();
}

/** Answers the same message once more, in a branch beside the answer. */
export function regenerate(chat: Chat, answer: Message, options: Options = {}): void {
  const parent = answer.parent && chat.messages[answer.parent];
  if (parent) void generate(chat, parent, options);
}

/** Puts an edited message beside the original. A user's is answered. */
export function edit(chat: Chat, message: Message, content: string): void {
  change({ editing: "" });
  if (content === message.content) return;
  const { files, pictures, model, callId, calls } = message;
  const copy = { parent: message.parent, role: message.role, content, files, pictures, model, callId, calls };
  const edited = add(chat, JSON.parse(JSON.stringify(copy)));
  keep(chat);
  if (message.role !== "assistant") void generate(chat, edited);
}

/** Gives the result of a tool's call; when all calls of the message have one, it is answered. */
export function giveResult(chat: Chat, answer: Message, call: ToolCall, content: string): void {
  const last = path(chat).at(-1)!;
  const message = add(chat, { parent: last.id, role: "tool", callId: call.id, content });
  keep(chat);
  const given = pathTo(chat, message.id).filter(each => each.role === "tool").map(each => each.callId);
  if (answer.calls!.every(each => given.includes(each.id))) void generate(chat, message);
  else changed();
}

/** Moves to the branch before or after, if there is one. */
export function otherBranch(chat: Chat, message: Message, by: number): Message | undefined {
  const all = siblings(chat, message.parent);
  return all[all.findIndex(each => each.id === message.id) + by];
}
