/** Conversations as trees: an edit or another answer is a new branch, and nothing is overwritten. */
import type { Chat, Message } from "./types";

export const ROOT = "root";

export function newId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(9));
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_");
}

export function newChat(system: string): Chat {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, system, messages: {}, chosen: {} };
}

/** Returns the messages of the chosen branch, the first one first. */
export function path(chat: Chat): Message[] {
  const found: Message[] = [];
  for (let above: string | null = null; ; ) {
    const next: Message | undefined = chat.messages[chat.chosen[above ?? ROOT] ?? ""];
    if (!next || next.parent !== above) return found;
    found.push(next);
    above = next.id;
  }
}

/** Returns the messages from the first to this one. */
export function pathTo(chat: Chat, id: string | null): Message[] {
  const found: Message[] = [];
  for (let at = id; at !== null && chat.messages[at]; at = chat.messages[at]!.parent) found.unshift(chat.messages[at]!);
  return found;
}

/** Returns all messages with the same parent, the oldest first. */
export function siblings(chat: Chat, parent: string | null): Message[] {
  return Object.values(chat.messages).filter(each => each.parent === parent);
}

/** Adds a message below its parent, and chooses it. */
export function add(chat: Chat, message: Omit<Message, "id" | "created">): Message {
  const added = { id: newId(), created: Date.now(), ...message };
  chat.messages[added.id] = added;
  choose(chat, added);
  chat.title ||= titleOf(added);
  return added;
}

export function choose(chat: Chat, message: Message): void {
  chat.chosen[message.parent ?? ROOT] = message.id;
  chat.updated = Date.now();
}

/** Removes a message and all that follows it. */
export function remove(chat: Chat, message: Message): void {
  for (const below of siblings(chat, message.id)) remove(chat, below);
  delete chat.messages[message.id];
  delete chat.chosen[message.id];
  const left = siblings(chat, message.parent).at(-1);
  if (left) choose(chat, left);
  else delete chat.chosen[message.parent ?? ROOT];
  chat.updated = Date.now();
}

/** Returns a new chat with the messages up to this one. */
export function fork(chat: Chat, message: Message): Chat {
  const copy = newChat(chat.system);
  let parent: string | null = null;
  for (const each of pathTo(chat, message.id)) {
    const { id: _, created: __, ...rest } = structuredClone(each);
    parent = add(copy, { ...rest, parent }).id;
  }
  copy.title = `${chat.title} (branch)`;
  return copy;
}

function titleOf(message: Message): string {
  const line = message.content.trim().split("\n")[0] || message.files?.[0]?.name || message.pictures?.[0]?.name || "Chat";
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

/** Returns the first place of the words in a chat, as a short text around it; null: they are not all there. */
export function find(chat: Chat, words: string): string | null {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const texts = [chat.title, ...Object.values(chat.messages).map(each => each.content)];
  const all = texts.join("\n").toLowerCase();
  if (!wanted.every(word => all.includes(word))) return null;
  for (const text of texts.slice(1)) {
    const at = text.toLowerCase().indexOf(wanted[0] ?? "");
    if (at >= 0) return `${at > 20 ? "…" : ""}${text.slice(Math.max(at - 20, 0), at + 60).replace(/\s+/g, " ")}`;
  }
  return "";
}
