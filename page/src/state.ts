/** The page's state, and how its parts hear of changes. */
import { useEffect, useState } from "preact/hooks";
import type { EngineView } from "./api";
import * as storage from "./storage";
import type { Chat, Preset, Settings } from "./types";

export interface Loading {
  model: string;
  began: number;
  expected: number; // milliseconds that it took the last time; 0: not known
}

export interface Answering {
  message: string;
  stop: AbortController;
}

export interface Sample {
  at: number;
  generated: number; // tokens a second
  prompt: number;
  busy: number; // share of the time
}

export const state = {
  chats: [] as Chat[],
  chat: null as Chat | null,
  settings: storage.loadSettings(),
  presets: storage.loadPresets(),
  theme: storage.loadTheme(),
  models: [] as string[],
  model: storage.loadModel(),
  sees: false, // the model takes pictures
  loading: null as Loading | null,
  keyWanted: "",
  answering: new Map<string, Answering>(), // by the chat's id: each may have an answer under way
  view: "chat" as "chat" | "engine",
  panel: false, // the settings are shown
  drawer: false, // the history is shown, on a narrow screen
  help: false,
  search: "",
  editing: "", // the message that is being edited
  notice: "", // shown for a moment
  spoken: "", // told to screen readers only
  engine: null as EngineView | null,
  unreachable: false,
  samples: [] as Sample[],
};

const listeners = new Set<() => void>();
let due = 0;

/** Has everything drawn again soon. */
export function changed(): void {
  if (!due) {
    due = window.setTimeout(() => {
      due = 0;
      for (const each of listeners) each();
    }, 16);
  }
}

export function change(values: Partial<typeof state>): void {
  Object.assign(state, values);
  changed();
}

/** Draws a component again whenever the state changes. */
export function useChanges(): void {
  const [, draw] = useState(0);
  useEffect(() => {
    const listener = () => draw(count => count + 1);
    listeners.add(listener);
    return () => void listeners.delete(listener);
  }, []);
}

export function set(values: Partial<Settings>): void {
  Object.assign(state.settings, values);
  if ("system" in values && state.chat) {
    state.chat.system = values.system!;
    keep(state.chat);
  }
  storage.saveSettings(state.settings);
  changed();
}

export function setPresets(presets: Preset[]): void {
  storage.savePresets(presets);
  change({ presets });
}

export function applyTheme(theme: string): void {
  storage.saveTheme(theme);
  document.documentElement.dataset.theme = theme;
  change({ theme });
}

let noticeEnds = 0;

/** Tells something in passing, to screen readers too. */
export function tell(notice: string): void {
  change({ notice });
  clearTimeout(noticeEnds);
  noticeEnds = window.setTimeout(() => change({ notice: "" }), 4000);
}

/** Returns the answer that is under way in a chat. */
export const answeringIn = (chat: Chat | null): Answering | undefined => (chat ? state.answering.get(chat.id) : undefined);

const unsaved = new Map<string, number>();

/** Keeps a chat in the browser, a little later. */
export function keep(chat: Chat): void {
  clearTimeout(unsaved.get(chat.id));
  unsaved.set(chat.id, window.setTimeout(() => void save(chat), 250));
  if (!state.chats.includes(chat)) state.chats.push(chat);
}

async function save(chat: Chat): Promise<void> {
  unsaved.delete(chat.id);
  try {
    await storage.saveChat(chat);
  } catch (error) {
    tell(`This browser could not save the chat: ${(error as Error).message}`);
  }
}

/** Keeps at once what is not kept yet: the page may be about to go. */
export function keepNow(): void {
  for (const [id, timer] of unsaved) {
    clearTimeout(timer);
    const chat = state.chats.find(each => each.id === id);
    if (chat) void save(chat);
  }
}

export function forget(chat: Chat): void {
  answeringIn(chat)?.stop.abort();
  clearTimeout(unsaved.get(chat.id));
  unsaved.delete(chat.id);
  void storage.forgetChat(chat.id);
  state.chats = state.chats.filter(each => each !== chat);
  if (state.chat === chat) state.chat = null;
  changed();
}

export async function copy(text: string, what: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text); // a page that came over plain HTTP from another machine has no clipboard
  }
  tell(`${what} copied`);
}

function copyBySelection(text: string): void {
  const area = document.createElement("textarea");
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

export function download(name: string, text: string, kind: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
