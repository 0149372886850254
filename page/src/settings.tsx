/** The settings: key, system prompt, presets, sampling, the form of the answer, looks. */
import { begin } from "./engine_state";
import { IconButton } from "./icons";
import { applyTheme, change, forget, set, setPresets, state, tell } from "./state";
import { loadKey, NO_SETTINGS, saveKey } from "./storage";
import type { Preset, Settings } from "./types";

const BUILT_IN: Preset[] = [
  { name: "Default", settings: NO_SETTINGS },
  { name: "Precise", settings: { ...NO_SETTINGS, temperature: "0", system: "Answer briefly and exactly. Say so if you do not know." } },
  { name: "Creative", settings: { ...NO_SETTINGS, temperature: "1", min_p: "0.05" } },
  { name: "Programmer", settings: { ...NO_SETTINGS, temperature: "0.2", system: "You are an experienced programmer. Answer with working code and a short explanation." } },
];
const FIELDS: [keyof Settings, string, string, Record<string, string>][] = [
  ["temperature", "Temperature", "model default", { min: "0", max: "2", step: "0.1" }],
  ["top_p", "Top p", "model default", { min: "0.01", max: "1", step: "0.01" }],
  ["top_k", "Top k", "model default", { min: "0", step: "1" }],
  ["min_p", "Min p", "model default", { min: "0", max: "1", step: "0.01" }],
  ["repetition_penalty", "Repetition penalty", "model default", { min: "0.1", max: "2", step: "0.05" }],
  ["seed", "Seed", "random", { step: "1" }],
  ["max_tokens", "Max tokens", "no limit", { min: "1", step: "1" }],
];

export function KeyField() {
  return (
    <label>API key
      <input id="key" type="password" autocomplete="off" placeholder="if the server needs one" defaultValue={loadKey()} onChange={event => { saveKey(event.currentTarget.value.trim()); begin(); }} />
    </label>
  );
}

export function SettingsPanel() {
  const settings = state.settings;
  const system = state.chat ? state.chat.system : settings.system;
  return (
    <aside id="settings" aria-label="Settings">
      <div class="panel-head"><h2>Settings</h2><IconButton icon="close" label="Close the settings" onClick={() => change({ panel: false })} /></div>
      <Presets />
      <label>System prompt<textarea id="system" rows={4} value={system} onInput={e => set({ system: e.currentTarget.value })} /></label>
      <fieldset>
        <legend>Sampling</legend>
        <div class="pair">
          {FIELDS.map(([name, label, placeholder, limits]) => (
            <label>{label}<input id={name} type="number" placeholder={placeholder} {...limits} value={String(settings[name])} onInput={e => set({ [name]: e.currentTarget.value })} /></label>
          ))}
        </div>
        <label class="inline"><input id="chances" type="checkbox" checked={settings.chances} onChange={e => set({ chances: e.currentTarget.checked })} />Token probabilities with every answer</label>
      </fieldset>
      <fieldset>
        <legend>Answer format</legend>
        <label>JSON schema<textarea id="schema" rows={3} spellcheck={false} value={settings.schema} onInput={e => set({ schema: e.currentTarget.value })} /></label>
        <label>Tools (a JSON list)<textarea id="tools" rows={3} spellcheck={false} value={settings.tools} onInput={e => set({ tools: e.currentTarget.value })} /></label>
        <label>Extra request fields (JSON)<textarea id="extra" rows={2} spellcheck={false} value={settings.extra} onInput={e => set({ extra: e.currentTarget.value })} /></label>
      </fieldset>
      <fieldset>
        <legend>This page</legend>
        <label>Theme
          <select id="theme" value={state.theme} onChange={e => applyTheme(e.currentTarget.value)}>
            <option value="auto">Same as the system</option><option value="light">Light</option><option value="dark">Dark</option>
          </select>
        </label>
        <KeyField />
        <p class="dim">The key stays in this tab. Chats stay in this browser.</p>
        <button type="button" class="danger" disabled={!state.chats.length} onClick={forgetAll}>Delete all chats</button>
      </fieldset>
    </aside>
  );
}

function forgetAll(): void {
  if (!confirm(`Delete all ${state.chats.length} chats of this browser?`)) return;
  for (const chat of [...state.chats]) forget(chat);
  tell("All chats deleted");
}

function Presets() {
  const all = [...BUILT_IN, ...state.presets];
  const apply = (name: string) => {
    const preset = all.findLast(each => each.name === name);
    if (!preset) return;
    set(preset.settings);
    tell(`Preset ${name}`);
  };
  const save = () => {
    const name = prompt("Name of the preset")?.trim();
    if (!name) return;
    const settings = { ...state.settings, system: state.chat?.system ?? state.settings.system };
    setPresets([...state.presets.filter(each => each.name !== name), { name, settings }]);
    tell(`Preset ${name} saved`);
  };
  const drop = () => {
    const name = prompt(`Preset to delete: ${state.presets.map(each => each.name).join(", ")}`)?.trim();
    setPresets(state.presets.filter(each => each.name !== name));
  };
  return (
    <div class="row bottom">
      <label>Preset
        <select id="preset" value="" onChange={event => { apply(event.currentTarget.value); event.currentTarget.value = ""; }}>
          <option value="">Choose…</option>
          {all.map(each => <option value={each.name}>{each.name}</option>)}
        </select>
      </label>
      <button id="save-preset" type="button" onClick={save}>Save</button>
      {state.presets.length > 0 && <button type="button" onClick={drop}>Delete</button>}
    </div>
  );
}
