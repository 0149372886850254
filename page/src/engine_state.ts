/** Watches the server: which models there are, and what the engine does. */
import { get, KeyWanted, post, type EngineView } from "./api";
import { change, changed, state, tell } from "./state";
import { loadTimes, saveModel, saveTimes } from "./storage";

const KEPT = 120; // samples: two minutes
let before: EngineView | null = null;
let entered = 0; // how often it was begun: a loop from before stops

export function begin(): void {
  change({ keyWanted: "" });
  void listModels();
  void watch(++entered);
}

async function listModels(): Promise<void> {
  try {
    const { data } = await get<{ data: { id: string }[] }>("v1/models");
    const models = data.map(each => each.id);
    change({ models });
    choose(models.includes(state.model) ? state.model : (models[0] ?? ""), false);
  } catch (error) {
    wanted(error);
  }
}

function wanted(error: unknown): boolean {
  if (error instanceof KeyWanted) change({ keyWanted: error.message });
  return error instanceof KeyWanted;
}

async function watch(mine: number): Promise<void> {
  if (mine !== entered) return;
  try {
    take(await get<EngineView>("engine"));
  } catch (error) {
    if (wanted(error)) return;
    change({ unreachable: true });
  }
  setTimeout(() => void watch(mine), document.hidden ? 5000 : state.loading ? 300 : 1000);
}

function take(engine: EngineView): void {
  if (before) {
    const seconds = Math.max(engine.time - before.time, 0.001);
    const grown = (name: "generated_tokens" | "computed_tokens" | "busy_seconds"): number =>
      Math.max(engine.stats[name] - before!.stats[name], 0) / seconds;
    const generated = grown("generated_tokens");
    state.samples.push({
      at: engine.time, generated, prompt: Math.max(grown("computed_tokens") - generated, 0),
      busy: Math.min(grown("busy_seconds"), 1),
    });
    if (state.samples.length > KEPT) state.samples.shift();
  }
  const names = (view: EngineView | null): string => (view?.models ?? []).map(each => each.name).join("\n");
  if (!state.models.length || (before && names(before) !== names(engine))) void listModels();
  before = engine;
  change({ engine, unreachable: false });
}

/** Says which model answers from now on, and has it loaded if it is not. */
export function choose(model: string, load = true): void {
  if (model) saveModel(model);
  change({ model, sees: false });
  if (load) void loadChosen(model);
  else void look(model);
}

async function loadChosen(model: string): Promise<void> {
  const known = state.engine?.models.find(each => each.name === model);
  if (!known || known.state === "awake") return look(model);
  const began = Date.now();
  change({ loading: { model, began, expected: loadTimes()[model] ?? 0 } });
  try {
    await post("models/load", { model });
    saveTimes({ ...loadTimes(), [model]: Date.now() - began });
    tell(`${model} is loaded`);
  } catch (error) {
    tell(`${model}: ${(error as Error).message}. The first message will load it.`);
  }
  if (state.loading?.model === model) change({ loading: null });
  await look(model);
}

/** Finds out whether the model takes pictures. One that is not loaded is not asked: that would load it. */
async function look(model: string): Promise<void> {
  const known = state.engine?.models.find(each => each.name === model);
  if (known && known.state !== "awake") return;
  try {
    const props = await get<{ modalities?: { vision?: boolean } }>(`props?model=${encodeURIComponent(model)}`);
    if (state.model === model) change({ sees: props.modalities?.vision === true });
  } catch {
    changed(); // other engines have no such route: then the model takes no pictures
  }
}
