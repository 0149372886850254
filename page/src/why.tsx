/** Says where the time of a request went. */
import type { EndedRequest } from "./api";
import type { Message } from "./types";

export interface Stage {
  name: string;
  seconds: number;
}

interface Course {
  stages: Stage[];
  prompt: number;
  cached: number;
  generated: number;
  miss?: string;
  preemptions?: number;
  recomputed?: number;
}

const NAMES: Record<string, string> = {
  loading: "loading the model", grammar: "grammar", adapter: "adapter", pause: "pause", kv: "KV from disk",
  queue: "queue", prefill: "prompt", decode: "answer",
};
const ORDER = Object.keys(NAMES);

export function seconds(value: number): string {
  if (value < 0.0095) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 100 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`;
}

function stages(told: Record<string, number | undefined>): Stage[] {
  return ORDER.flatMap(name => (told[name] ? [{ name, seconds: told[name]! }] : []));
}

export function courseOf(ended: EndedRequest): Course {
  const { loading, queue, prefill, decode } = ended;
  return {
    stages: stages({ loading, ...ended.waited, queue, prefill, decode }),
    prompt: ended.prompt_tokens, cached: ended.cached_tokens, generated: ended.generated_tokens,
    preemptions: ended.preemptions, recomputed: ended.recomputed_tokens,
  };
}

export function courseOfMessage(message: Message): Course | null {
  const choice = message.report?.choices?.[0];
  if (!choice?.seconds || !message.usage) return null;
  return {
    stages: stages({ loading: message.report!.loading_seconds, ...choice.seconds }),
    prompt: message.usage.prompt_tokens, cached: choice.cache?.reused_tokens ?? 0,
    generated: message.usage.completion_tokens, miss: choice.cache?.miss?.message,
    preemptions: choice.preemptions, recomputed: choice.recomputed_tokens,
  };
}

/** Returns in a sentence or two what took longest, and why. */
export function why(course: Course): string {
  const longest = course.stages.reduce<Stage | null>((a, b) => (a && a.seconds >= b.seconds ? a : b), null);
  if (!longest) return "The engine reported no times: the client left, or a stop string ended the answer.";
  const took = seconds(longest.seconds);
  const computed = course.prompt - course.cached;
  const texts: Record<string, string> = {
    loading: `Loading the model took ${took}.`,
    grammar: `It waited ${took} for its grammar to be compiled.`,
    adapter: `It waited ${took} for its adapter.`,
    pause: `It waited ${took} for a pause to end.`,
    kv: `It waited ${took} for KV to be read from disk.`,
    queue: `It waited ${took} in the queue behind other requests.`,
    prefill: `The prompt took ${took}: ${computed} of its ${course.prompt} tokens had to be computed.`,
    decode: `The answer took ${took}: ${course.generated} tokens, ${(course.generated / longest.seconds).toFixed(0)} a second.`,
  };
  const said = [texts[longest.name]!];
  if (course.preemptions) {
    said.push(`The KV cache was full, so it was preempted ${course.preemptions} times and ${course.recomputed} tokens were computed again.`);
  }
  if (course.miss && longest.name === "prefill") said.push(`No more was reused because ${course.miss}.`);
  return said.join(" ");
}

export function Stages({ course }: { course: Course }) {
  const all = course.stages.reduce((sum, each) => sum + each.seconds, 0) || 1;
  const told = course.stages.map(each => `${NAMES[each.name]} ${seconds(each.seconds)}`).join(", ");
  return (
    <div class="stages" role="img" aria-label={told || "no times"} title={told}>
      {course.stages.map(each => <span class={`stage-${each.name}`} style={{ width: `${(100 * each.seconds) / all}%` }} />)}
    </div>
  );
}

export function StageList({ course }: { course: Course }) {
  return (
    <ul class="legend">
      {course.stages.map(each => <li><i class={`stage-${each.name}`} />{NAMES[each.name]} {seconds(each.seconds)}</li>)}
    </ul>
  );
}
