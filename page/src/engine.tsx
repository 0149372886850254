/** The window on the engine: what runs and what waits, the KV cache, the steps, and where requests lose time. */
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { EndedRequest, EngineView, LiveRequest, ModelState, Replica } from "./api";
import { StepTimeline, Throughput } from "./charts";
import { state } from "./state";
import { courseOf, seconds, StageList, Stages, why } from "./why";

const CELLS = 240;
const HUES = 6;

const percent = (part: number, all: number): string => (all ? `${Math.round((100 * part) / all)} %` : "–");
const time = (value: number | null): string => (value === null ? "–" : seconds(value));
const bytes = (value: number): string => (value >= 1e9 ? `${(value / 1e9).toFixed(1)} GB` : `${Math.round(value / 1e6)} MB`);

function Card({ title, wide, children }: { title: string; wide?: boolean; children: ComponentChildren }) {
  return <section class={wide ? "card wide" : "card"} aria-label={title}><h2>{title}</h2>{children}</section>;
}

export function Engine() {
  const engine = state.engine;
  if (!engine) return <div id="engine" class="page" tabIndex={-1}><p>{state.unreachable ? "The server does not answer." : "Waiting for the server…"}</p></div>;
  const awake = engine.models.filter(each => each.state === "awake");
  return (
    <div id="engine" class="page" tabIndex={-1}>
      {state.unreachable && <p class="error" role="alert">The server does not answer: these figures are old.</p>}
      <Headline engine={engine} />
      <div class="cards">
        <Card title="Tokens a second">
          <Throughput samples={state.samples} />
          <ul class="legend"><li><i class="answer-bar" />answers</li><li><i class="prompt-bar" />prompts</li></ul>
        </Card>
        <StepsCard models={awake} />
        <Card title="Requests now" wide><Requests requests={engine.requests} /></Card>
        <Card title="KV cache"><KvMap engine={engine} blockSize={awake[0]?.block_size ?? 16} /></Card>
        <Card title="Prefix reuse"><Reuse engine={engine} /></Card>
        {engine.replicas.length > 0 && <Card title="Replicas" wide><Replicas replicas={engine.replicas} /></Card>}
        {engine.engines.length > 0 && <Card title="Other engines" wide><Engines engines={engine.engines} /></Card>}
        <Card title="Where the time went" wide><Recent ended={engine.ended} /></Card>
        <Card title="Models" wide><Models models={engine.models} /></Card>
      </div>
      <p class="dim">Penstock {engine.version}</p>
    </div>
  );
}

function Headline({ engine: { stats, latency } }: { engine: EngineView }) {
  const now = state.samples.at(-1);
  const figures: [string, string, string][] = [
    ["rate", "Tokens a second", now ? now.generated.toFixed(0) : "–"],
    ["running", "Running", String(stats.running)],
    ["waiting", "Waiting", String(stats.waiting)],
    ["ttft", "To the first token, median", time(latency.first_token)],
    ["itl", "Between tokens, median", time(latency.between_tokens)],
    ["busy", "Busy", now ? percent(now.busy, 1) : "–"],
    ["preempted", "Preemptions", String(stats.preemptions)],
  ];
  if (stats.drafted_tokens) figures.push(["drafts", "Drafted tokens accepted", percent(stats.accepted_tokens, stats.drafted_tokens)]);
  return (
    <dl class="headline">
      {figures.map(([id, name, value]) => <div><dt>{name}</dt><dd id={id}>{value}</dd></div>)}
    </dl>
  );
}

function StepsCard({ models }: { models: ModelState[] }) {
  const [name, setName] = useState("");
  const model = models.find(each => each.name === name) ?? models[0];
  return (
    <Card title="Steps">
      {models.length > 1 && (
        <select aria-label="Model whose steps are shown" value={model?.name} onChange={e => setName(e.currentTarget.value)}>
          {models.map(each => <option value={each.name}>{each.name}</option>)}
        </select>
      )}
      <StepTimeline steps={model?.steps ?? []} />
      <ul class="legend"><li><i class="answer-bar" />tokens of answers</li><li><i class="prompt-bar" />tokens of prompts, and drafts that were wrong</li></ul>
    </Card>
  );
}

function Table({ id, label, heads, children }: { id?: string; label: string; heads: string[]; children: ComponentChildren }) {
  return (
    <div class="scroll" role="region" aria-label={label} tabIndex={0}>
      <table class="figures-table">
        <thead><tr>{heads.map(each => <th scope="col">{each}</th>)}</tr></thead>
        <tbody id={id}>{children}</tbody>
      </table>
    </div>
  );
}

function Requests({ requests }: { requests: LiveRequest[] }) {
  if (!requests.length) return <p class="dim">No request is in flight.</p>;
  return (
    <Table id="requests" label="Requests now" heads={["Request", "Model", "Phase", "Since", "Prompt", "Reused", "Answer", "Tokens/s"]}>
      {requests.map((each, at) => (
        <tr key={each.id}>
          <td><i class={`dot hue-${at % HUES}`} /><code title={each.id}>{each.id.slice(0, 12)}</code>{each.key ? ` ${each.key}` : ""}</td>
          <td>{each.model}</td>
          <td><span class={`phase ${each.phase}`} title={each.route}>{each.phase}</span></td>
          <td>{seconds(each.seconds)}</td>
          <td>{each.prompt_tokens}</td>
          <td>{each.cached_tokens ?? "–"}</td>
          <td>{each.generated_tokens}</td>
          <td>{each.first_token !== null && each.generated_tokens > 1 ? ((each.generated_tokens - 1) / Math.max(each.seconds - each.first_token, 0.001)).toFixed(0) : "–"}</td>
        </tr>
      ))}
    </Table>
  );
}

/** Draws every so many blocks as a cell. Whose a used block is follows from the tokens of the requests. */
function KvMap({ engine, blockSize }: { engine: EngineView; blockSize: number }) {
  const { used, cached, free } = engine.stats.kv_blocks;
  const all = used + cached + free;
  const count = Math.min(all, CELLS);
  const cells = (blocks: number): number => Math.min(blocks ? Math.max(Math.round((count * blocks) / all), 1) : 0, count);
  const kinds: string[] = [];
  const sizes = engine.requests.map(each => (each.phase === "waiting" ? 0 : Math.ceil((each.prompt_tokens + each.generated_tokens) / blockSize)));
  const claimed = sizes.reduce((sum, each) => sum + each, 0) || 1;
  sizes.forEach((size, at) => kinds.push(...Array(Math.round((cells(used) * size) / claimed)).fill(`hue-${at % HUES}`)));
  while (kinds.length < cells(used)) kinds.push("used");
  kinds.push(...Array(cells(cached)).fill("cached"));
  while (kinds.length < count) kinds.push("free");
  const told = `${used} blocks used, ${cached} cached for reuse, ${free} free`;
  return (
    <>
      <div id="kv" class="kv" role="img" aria-label={`KV cache: ${told}`}>{kinds.slice(0, count).map(kind => <i class={kind} />)}</div>
      {used > 0 && (
        <div class="stages" role="img" aria-label="Used blocks by request">
          {sizes.map((size, at) => <span class={`hue-${at % HUES}`} style={{ width: `${(100 * size) / claimed}%` }} title={`${engine.requests[at]!.id}: about ${size} blocks`} />)}
        </div>
      )}
      <p id="cache">{told}{all > count && count > 0 ? ` (a square is ${Math.round(all / count)} blocks of ${blockSize} tokens)` : ""}</p>
      <ul class="legend"><li><i class="used" />used, a colour for each request</li><li><i class="cached" />cached for reuse</li><li><i class="free" />free</li></ul>
      {engine.stats.host_places > 0 && <p class="dim">Host memory: {engine.stats.host_blocks} of {engine.stats.host_places} blocks</p>}
      {engine.stats.disk_blocks > 0 && <p class="dim">On disk: {engine.stats.disk_blocks} blocks</p>}
    </>
  );
}

function Reuse({ engine: { stats } }: { engine: EngineView }) {
  const computed = Math.max(stats.prompt_tokens - stats.cached_tokens, 0);
  const tiers = Object.entries(stats.reused_tokens);
  return (
    <>
      <p class="large" id="reuse">{percent(stats.cached_tokens, stats.prompt_tokens)}</p>
      <p>of {stats.prompt_tokens.toLocaleString("en")} prompt tokens were reused since the engine started; {computed.toLocaleString("en")} were computed.</p>
      <div class="stages" role="img" aria-label={`${stats.cached_tokens} reused, ${computed} computed`}>
        <span class="stage-reused" style={{ width: `${(100 * stats.cached_tokens) / (stats.prompt_tokens || 1)}%` }} />
        <span class="stage-prefill" style={{ width: `${(100 * computed) / (stats.prompt_tokens || 1)}%` }} />
      </div>
      {tiers.length > 0 && <p class="dim">From {tiers.map(([tier, tokens]) => `${tier}: ${tokens}`).join(", ")}</p>}
    </>
  );
}

function Recent({ ended }: { ended: EndedRequest[] }) {
  const [slowest, setSlowest] = useState(false);
  const shown = (slowest ? ended.toSorted((a, b) => b.seconds - a.seconds) : ended).slice(0, 20);
  if (!shown.length) return <p class="dim">No request has ended yet.</p>;
  return (
    <>
      <label class="inline"><input type="checkbox" checked={slowest} onChange={e => setSlowest(e.currentTarget.checked)} />The slowest first</label>
      <ol id="recent" class="recent">
        {shown.map(each => <RecentRequest key={each.id + each.ended} ended={each} />)}
      </ol>
      <StageLegend />
    </>
  );
}

function StageLegend() {
  const names = ["loading the model", "other waiting", "queue", "prompt", "answer"];
  return <ul class="legend">{["loading", "kv", "queue", "prefill", "decode"].map((each, at) => <li><i class={`stage-${each}`} />{names[at]}</li>)}</ul>;
}

function RecentRequest({ ended }: { ended: EndedRequest }) {
  const course = courseOf(ended);
  return (
    <li>
      <details>
        <summary>
          <code title={ended.id}>{ended.id.slice(0, 12)}</code>
          <span class={`phase ${ended.reason}`}>{ended.reason}</span>
          <Stages course={course} />
          <span class="took">{seconds(ended.seconds)}</span>
          <span class="dim sizes">{ended.prompt_tokens} → {ended.generated_tokens} tokens</span>
        </summary>
        <p>{why(course)}</p>
        <StageList course={course} />
        <p class="dim">
          {ended.model}{ended.key ? ` · key ${ended.key}` : ""} · first token after {time(ended.first_token)} · between tokens {time(ended.between_tokens)}
          {" · "}{ended.cached_tokens} of {ended.prompt_tokens} prompt tokens reused{ended.route ? ` · ${ended.route}` : ""}
        </p>
      </details>
    </li>
  );
}

function Replicas({ replicas }: { replicas: Replica[] }) {
  return (
    <Table id="replicas" label="Replicas" heads={["Replica", "Running", "Waiting", "KV used", "Prompt tokens queued", "Requests routed", "Reuse expected / actual", "Restarts"]}>
      {replicas.map(each => {
        const { used, cached, free } = each.kv_blocks;
        return (
          <tr key={each.name}>
            <td>{each.name}{each.state === "ready" ? "" : ` (${each.state})`}</td>
            <td>{each.running}</td><td>{each.waiting}</td>
            <td>{percent(used, used + cached + free)}</td>
            <td>{each.queued_tokens}</td><td>{each.routed_requests}</td>
            <td>{each.promised_tokens} / {each.reused_tokens}</td><td>{each.restarts}</td>
          </tr>
        );
      })}
    </Table>
  );
}

function Engines({ engines }: { engines: EngineView["engines"] }) {
  return (
    <Table id="engines" label="Other engines" heads={["Engine", "Kind", "State", "In flight", "Models"]}>
      {engines.map(each => (
        <tr key={each.name}><td>{each.name}</td><td>{each.kind}</td><td title={each.reason}>{each.state}</td><td>{each.in_flight}</td><td>{each.models.join(", ")}</td></tr>
      ))}
    </Table>
  );
}

function Models({ models }: { models: ModelState[] }) {
  return (
    <Table id="models" label="Models" heads={["Model", "State", "Memory", "Context", "Rows", "Tokens a step", "KV blocks"]}>
      {models.map(each => (
        <tr key={each.name}>
          <td>{each.name}</td><td title={each.error}>{each.state}{each.error ? " (failed)" : ""}</td><td>{each.bytes ? bytes(each.bytes) : "–"}</td>
          <td>{each.max_len ?? "–"}</td><td>{each.max_rows ?? "–"}</td><td>{each.step_tokens ?? "–"}</td><td>{each.blocks ?? "–"}</td>
        </tr>
      ))}
    </Table>
  );
}
