/** Lists the chats that this browser keeps, with search, export and import; below it, the engine in brief. */
import { useRef } from "preact/hooks";
import { IconButton, Icon } from "./icons";
import { answeringIn, change, download, forget, keep, state, tell } from "./state";
import { asMarkdown, exported, imported } from "./storage";
import { find, newId, path } from "./tree";
import type { Chat } from "./types";
import { Spark } from "./charts";

const DAY = 86_400_000;

export function open(chat: Chat | null): void {
  change({ chat, view: "chat", drawer: false, editing: "" });
}

function dayOf(time: number): string {
  const days = Math.floor((new Date().setHours(0, 0, 0, 0) + DAY - 1 - time) / DAY);
  return days <= 0 ? "Today" : days === 1 ? "Yesterday" : days < 7 ? "This week" : days < 31 ? "This month" : "Older";
}

export function Sidebar() {
  const file = useRef<HTMLInputElement>(null);
  const found = state.chats
    .map(chat => ({ chat, hit: state.search.trim() ? find(chat, state.search) : "" }))
    .filter(each => each.hit !== null)
    .sort((a, b) => b.chat.updated - a.chat.updated);
  const take = async (chosen: FileList | null) => {
    for (const each of chosen ?? []) {
      try {
        const chats = imported(await each.text());
        for (const chat of chats) {
          if (state.chats.some(other => other.id === chat.id)) chat.id = newId();
          keep(chat);
        }
        tell(`${chats.length} ${chats.length === 1 ? "chat" : "chats"} imported`);
      } catch (error) {
        tell(`${each.name}: ${(error as Error).message}`);
      }
    }
  };
  let day = "";
  return (
    <nav id="sidebar" class={state.drawer ? "open" : ""} aria-label="Chats">
      <div class="brand">
        <span class="mark" aria-hidden="true">≋</span><h1>Penstock</h1>
        <IconButton icon="close" label="Close the list" class="narrow" onClick={() => change({ drawer: false })} />
      </div>
      <button id="new" type="button" class="wide" onClick={() => open(null)}><Icon name="plus" />New chat</button>
      <input id="search" type="search" aria-label="Search chats" placeholder="Search chats" value={state.search} onInput={e => change({ search: e.currentTarget.value })} />
      <ul id="chats">
        {found.map(({ chat, hit }) => {
          const heading = dayOf(chat.updated);
          const first = heading !== day;
          day = heading;
          return <Entry key={chat.id} chat={chat} hit={hit ?? ""} heading={first ? heading : ""} />;
        })}
        {!found.length && <li class="empty">{state.search ? "No chat has these words." : "Chats are kept in this browser only."}</li>}
      </ul>
      <div class="row small">
        <button id="export" type="button" class="quiet" disabled={!state.chats.length} onClick={() => download("penstock-chats.json", exported(state.chats), "application/json")}><Icon name="out" />Export all</button>
        <button id="import" type="button" class="quiet" onClick={() => file.current?.click()}><Icon name="into" />Import</button>
        <input ref={file} id="import-file" type="file" accept="application/json,.json" hidden aria-label="File to import" onChange={e => { void take(e.currentTarget.files); e.currentTarget.value = ""; }} />
      </div>
      <Brief />
    </nav>
  );
}

function Entry({ chat, hit, heading }: { chat: Chat; hit: string; heading: string }) {
  return (
    <li>
      {heading && <h2>{heading}</h2>}
      <div class="entry">
        <button type="button" class="chat" aria-current={state.chat === chat ? "page" : undefined} onClick={() => open(chat)}>
          <span>{answeringIn(chat) && <i class="dot hue-0" title="an answer is under way" />}{chat.title || "Chat"}</span>
          {hit && <small>{hit}</small>}
        </button>
        <details class="menu" onKeyDown={closeOnEscape}>
          <summary aria-label={`More about ${chat.title}`}><Icon name="more" /></summary>
          <div>
            <button type="button" onClick={event => { close(event); rename(chat); }}>Rename</button>
            <button type="button" onClick={event => { close(event); download("chat.json", exported([chat]), "application/json"); }}>Export as JSON</button>
            <button type="button" onClick={event => { close(event); download("chat.md", asMarkdown(chat, path(chat)), "text/markdown"); }}>Export as Markdown</button>
            <button type="button" class="danger" onClick={event => { close(event); drop(chat); }}>Delete</button>
          </div>
        </details>
      </div>
    </li>
  );
}

function close(event: Event): void {
  (event.currentTarget as HTMLElement).closest("details")!.open = false;
}

function closeOnEscape(event: KeyboardEvent): void {
  const menu = event.currentTarget as HTMLDetailsElement;
  if (event.key !== "Escape" || !menu.open) return;
  event.stopPropagation();
  menu.open = false;
  menu.querySelector("summary")!.focus();
}

function drop(chat: Chat): void {
  if (!confirm(`Delete the chat "${chat.title}"?`)) return;
  forget(chat);
  tell("Chat deleted");
}

function rename(chat: Chat): void {
  const title = prompt("Title of this chat", chat.title)?.trim();
  if (!title) return;
  chat.title = title;
  keep(chat);
  change({});
}

function Brief() {
  const stats = state.engine?.stats;
  const blocks = stats?.kv_blocks;
  const all = blocks ? blocks.used + blocks.cached + blocks.free || 1 : 1;
  const rate = state.samples.at(-1)?.generated ?? 0;
  return (
    <button id="brief" type="button" title="Show the engine" onClick={() => change({ view: "engine", drawer: false })}>
      <span class="brief-head">
        <span>Engine</span>
        <span>{state.unreachable ? "no answer" : stats ? `${rate.toFixed(0)} tokens/s` : "–"}</span>
      </span>
      <Spark values={state.samples.map(each => each.generated)} />
      <span class="brief-head dim">
        <span>{stats ? `${stats.running} running, ${stats.waiting} waiting` : ""}</span>
        <span>{blocks ? `KV ${Math.round((100 * blocks.used) / all)} %` : ""}</span>
      </span>
    </button>
  );
}
