/** Puts the page together. */
import { Fragment, render } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { otherBranch, regenerate, stop } from "./answer";
import { Composer } from "./composer";
import { Engine } from "./engine";
import { begin, choose } from "./engine_state";
import { Help } from "./help";
import { IconButton } from "./icons";
import { MessageView, versionOf } from "./message";
import { KeyField, SettingsPanel } from "./settings";
import { open, Sidebar } from "./sidebar";
import { answeringIn, applyTheme, change, changed, copy, keep, keepNow, state, useChanges } from "./state";
import { loadChats } from "./storage";
import { choose as chooseBranch, path } from "./tree";
import { Welcome } from "./welcome";

function Page() {
  useChanges();
  useEffect(() => {
    document.title = state.view === "engine" ? "Engine – Penstock" : `${state.chat?.title || "Penstock"}`;
  });
  return (
    <>
      <Sidebar />
      {state.drawer && <div class="shade" onClick={() => change({ drawer: false })} />}
      <main>
        <Header />
        {state.keyWanted && <KeyWanted />}
        {state.view === "engine" ? <Engine /> : <Conversation />}
        {state.view === "chat" && <Composer />}
      </main>
      {state.panel && <SettingsPanel />}
      {state.help && <Help />}
      <div id="spoken" role="status" class="hidden">{state.spoken}</div>
      <div id="notice" role="status" class={state.notice ? "shown" : ""}>{state.notice}</div>
    </>
  );
}

function Header() {
  const states = new Map(state.engine?.models.map(each => [each.name, each.state]));
  return (
    <header>
      <IconButton icon="menu" label="Chats" class="narrow" onClick={() => change({ drawer: true })} />
      <label class="hidden" for="model">Model</label>
      <select id="model" value={state.model} onChange={event => choose(event.currentTarget.value)}>
        {!state.models.length && <option value="">No model</option>}
        {state.models.map(each => (
          <option value={each}>{each}{states.has(each) && states.get(each) !== "awake" ? ` (${states.get(each)})` : ""}</option>
        ))}
      </select>
      {state.loading && <LoadProgress key={state.loading.model} />}
      <span class="spring" />
      <div class="switch" role="group" aria-label="View">
        <button type="button" id="show-chat" aria-pressed={state.view === "chat"} onClick={() => change({ view: "chat" })}>Chat</button>
        <button type="button" id="show-engine" aria-pressed={state.view === "engine"} onClick={() => change({ view: "engine" })}>Engine</button>
      </div>
      <IconButton icon="help" label="Keys" class="roomy" onClick={() => change({ help: true })} />
      <IconButton icon="gear" id="show-settings" label="Settings" pressed={state.panel} onClick={() => change({ panel: !state.panel })} />
    </header>
  );
}

/** Shows that a model is being loaded: how far it should be by the time that it took before, if that is known. */
function LoadProgress() {
  const [, tick] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => tick(count => count + 1), 200);
    return () => clearInterval(timer);
  }, []);
  if (!state.loading) return null;
  const { model, began, expected } = state.loading;
  const passed = Date.now() - began;
  return (
    <span id="loading" class="loading" role="status">
      <progress aria-label={`Loading ${model}`} max={1} {...(expected ? { value: Math.min(passed / expected, 0.98) } : {})} />
      loading, {(passed / 1000).toFixed(0)} s{expected ? ` of about ${(expected / 1000).toFixed(0)} s` : ""}
    </span>
  );
}

function KeyWanted() {
  return <div id="wanted" role="alert"><p>This server needs an API key. Enter yours. ({state.keyWanted})</p><KeyField /></div>;
}

function Conversation() {
  const box = useRef<HTMLElement>(null);
  const follows = useRef(true); // the end is in sight, so it stays there
  const chat = state.chat;
  useLayoutEffect(() => {
    if (follows.current) box.current!.scrollTop = box.current!.scrollHeight;
  });
  useLayoutEffect(() => {
    follows.current = true;
  }, [chat?.id]);
  const onScroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = box.current!;
    follows.current = scrollHeight - scrollTop - clientHeight < 40;
  };
  return (
    <section id="messages" class="page" ref={box} aria-label="Conversation" tabIndex={0} onScroll={onScroll}>
      {!chat ? <Welcome /> : path(chat).map(each => (
        <Fragment key={each.id}>
          <MessageView chat={chat} message={each} live={answeringIn(chat)?.message === each.id} version={versionOf(chat, each)} />
        </Fragment>
      ))}
    </section>
  );
}

/** Does what a key asks for; returns whether it did. */
function pressed(event: KeyboardEvent): boolean {
  const chat = state.chat;
  const last = chat && path(chat).findLast(each => each.role === "assistant");
  const aside = (by: number): void => {
    const other = chat && last && otherBranch(chat, last, by);
    if (other) {
      chooseBranch(chat, other);
      keep(chat);
      changed();
    }
  };
  const actions: Record<string, () => void> = {
    KeyN: () => open(null),
    KeyK: () => {
      change({ drawer: true });
      setTimeout(() => document.getElementById("search")?.focus(), 30);
    },
    KeyE: () => change({ view: state.view === "chat" ? "engine" : "chat" }),
    KeyS: () => change({ panel: !state.panel }),
    KeyR: () => void (chat && last && regenerate(chat, last)),
    KeyC: () => void (last && copy(last.content, "Answer")),
    KeyH: () => change({ help: true }),
    ArrowLeft: () => aside(-1),
    ArrowRight: () => aside(1),
  };
  const typing = event.target instanceof HTMLTextAreaElement || event.target instanceof HTMLInputElement;
  if (!event.altKey || event.ctrlKey || event.metaKey || (typing && event.code.startsWith("Arrow") && (event.target as HTMLInputElement).value)) return false;
  const action = actions[event.code];
  action?.();
  return !!action;
}

document.addEventListener("keydown", event => {
  if (event.key === "Escape" && !state.help) {
    if (answeringIn(state.chat)) stop();
    else if (state.drawer || state.panel || state.editing) change({ drawer: false, panel: false, editing: "" });
  } else if (pressed(event)) event.preventDefault();
});
window.addEventListener("pagehide", keepNow);

applyTheme(state.theme);
begin();
loadChats().then(chats => change({ chats: [...chats, ...state.chats] }), () => changed());
render(<Page />, document.getElementById("page")!);
