/** What the browser keeps: chats in IndexedDB, settings in localStorage, the key in this tab alone. */
import { newId } from "./tree";
import type { Chat, Message, Preset, Settings } from "./types";

const STORE = "chats";
const FORMAT = "penstock-chats";
export const NO_SETTINGS: Settings = {
  system: "", temperature: "", top_p: "", top_k: "", min_p: "", repetition_penalty: "", seed: "", max_tokens: "",
  schema: "", tools: "", extra: "", chances: false,
};

function done<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

let opened: Promise<IDBDatabase> | undefined;

function database(): Promise<IDBDatabase> {
  if (!opened) {
    const request = indexedDB.open("penstock", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    opened = done(request);
  }
  return opened;
}

async function chats(mode: IDBTransactionMode): Promise<IDBObjectStore> {
  return (await database()).transaction(STORE, mode).objectStore(STORE);
}

export async function loadChats(): Promise<Chat[]> {
  return done(await chats("readonly").then(store => store.getAll()));
}

export async function saveChat(chat: Chat): Promise<void> {
  await done(await chats("readwrite").then(store => store.put(chat)));
}

export async function forgetChat(id: string): Promise<void> {
  await done(await chats("readwrite").then(store => store.delete(id)));
}

function read<T>(name: string, otherwise: T): T {
  try {
    return JSON.parse(localStorage.getItem(`penstock-${name}`) ?? "null") ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(name: string, value: unknown): void {
  localStorage.setItem(`penstock-${name}`, JSON.stringify(value));
}

export const loadSettings = (): Settings => ({ ...NO_SETTINGS, ...read<Partial<Settings>>("settings", {}) });
export const saveSettings = (settings: Settings): void => write("settings", settings);
export const loadPresets = (): Preset[] => read<Preset[]>("presets", []);
export const savePresets = (presets: Preset[]): void => write("presets", presets);
export const loadTheme = (): string => read("theme", "auto");
export const saveTheme = (theme: string): void => write("theme", theme);
export const loadModel = (): string => read("model", "");
export const saveModel = (model: string): void => write("model", model);
export const loadTimes = (): Record<string, number> => read("load-times", {});
export const saveTimes = (times: Record<string, number>): void => write("load-times", times);

/** The key is kept while this tab is open; no other origin can read it there. */
export const loadKey = (): string => sessionStorage.getItem("penstock-key") ?? "";
export const saveKey = (key: string): void => sessionStorage.setItem("penstock-key", key);

export function exported(chats: Chat[]): string {
  return JSON.stringify({ format: FORMAT, version: 1, chats }, null, 1);
}

/** Returns the chats of an exported file; throws what is wrong with it. Pictures must be in the file itself. */
export function imported(text: string): Chat[] {
  let told: { format?: unknown; chats?: unknown };
  try {
    told = JSON.parse(text);
  } catch {
    throw new Error("this file is not JSON: choose one that was exported here");
  }
  if (told?.format !== FORMAT || !Array.isArray(told.chats)) {
    throw new Error(`this file has no chats: its "format" should be "${FORMAT}"`);
  }
  return told.chats.map(readChat);
}

function readChat(chat: Chat): Chat {
  const text = (value: unknown): string => (typeof value === "string" ? value : "");
  const time = (value: unknown): number => (typeof value === "number" ? value : Date.now());
  if (typeof chat?.messages !== "object" || typeof chat.chosen !== "object") throw new Error("a chat has no messages");
  const messages: Record<string, Message> = {};
  for (const [id, message] of Object.entries(chat.messages)) {
    if (!["user", "assistant", "tool"].includes(message?.role)) throw new Error(`a message has the role ${message?.role}`);
    const parent = typeof message.parent === "string" ? message.parent : null;
    messages[id] = { ...message, id, parent, content: text(message.content), created: time(message.created) };
    for (const name of ["files", "pictures", "calls", "chances"] as const) {
      if (name in message && !Array.isArray(message[name])) delete messages[id][name];
    }
    const pictures = messages[id].pictures?.filter(each => /^data:image\//.test(text(each?.url)));
    if (pictures) messages[id].pictures = pictures;
  }
  return {
    id: text(chat.id) || newId(), title: text(chat.title), created: time(chat.created), updated: time(chat.updated),
    system: text(chat.system), messages, chosen: { ...chat.chosen },
  };
}

/** Returns a chat's chosen branch for people to read. */
export function asMarkdown(chat: Chat, shown: Message[]): string {
  const names = { user: "You", assistant: "Assistant", tool: "Tool" };
  const parts = shown.map(each => `## ${names[each.role]}\n\n${each.content}`);
  return [`# ${chat.title}`, ...(chat.system ? [`> ${chat.system.replaceAll("\n", "\n> ")}`] : []), ...parts].join("\n\n") + "\n";
}
