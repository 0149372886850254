/** Small charts, drawn as SVG. */
import type { Step } from "./api";
import type { Sample } from "./state";
import { seconds } from "./why";

const WIDTH = 120;

function line(values: number[], top: number, height: number): string {
  return values.map((value, at) => `${at + WIDTH - values.length},${(height - 1 - ((height - 2) * value) / top).toFixed(2)}`).join(" ");
}

export function Spark({ values }: { values: number[] }) {
  return (
    <svg class="spark" viewBox={`0 0 ${WIDTH} 24`} preserveAspectRatio="none" aria-hidden="true">
      <polyline points={line(values, Math.max(...values, 1), 24)} />
    </svg>
  );
}

export function Throughput({ samples }: { samples: Sample[] }) {
  const top = Math.max(...samples.map(each => Math.max(each.generated, each.prompt)), 1);
  const last = samples.at(-1);
  const told = `Peak of the last two minutes: ${top.toFixed(0)} tokens a second. Now: ${(last?.generated ?? 0).toFixed(0)} of answers, ${(last?.prompt ?? 0).toFixed(0)} of prompts.`;
  return (
    <figure>
      <svg class="chart" viewBox={`0 0 ${WIDTH} 60`} preserveAspectRatio="none" role="img" aria-label={told}>
        <polyline class="prompt-line" points={line(samples.map(each => each.prompt), top, 60)} />
        <polyline id="plot" class="answer-line" points={line(samples.map(each => each.generated), top, 60)} />
      </svg>
      <figcaption>{told}</figcaption>
    </figure>
  );
}

/** Draws the last steps: a bar is as high as its step was long, and shows whose tokens it computed. */
export function StepTimeline({ steps }: { steps: Step[] }) {
  const shown = steps.slice(-WIDTH);
  const sorted = shown.map(step => step[2]).sort((a, b) => a - b);
  const top = sorted.at(-1) || 1;
  const slowest = shown.find(step => step[2] === top);
  const told = slowest
    ? `${shown.length} steps: the median took ${seconds(sorted[sorted.length >> 1]!)}, the longest ${seconds(top)} (step ${slowest[1]}: ${slowest[3]} tokens, ${slowest[5]} running, ${slowest[6]} waiting).`
    : "No step yet.";
  return (
    <figure>
      <svg class="chart" viewBox={`0 0 ${WIDTH} 60`} preserveAspectRatio="none" role="img" aria-label={told}>
        {shown.map((step, at) => <StepBar step={step} x={at + WIDTH - shown.length} height={(58 * step[2]) / top} />)}
      </svg>
      <figcaption>{told}</figcaption>
    </figure>
  );
}

function StepBar({ step, x, height }: { step: Step; x: number; height: number }) {
  const [, number, taken, tokens, generated, running, waiting] = step;
  const answers = tokens ? Math.min(generated / tokens, 1) * height : height;
  return (
    <g>
      <title>{`step ${number}: ${seconds(taken)}, ${tokens} tokens (${generated} of answers), ${running} running, ${waiting} waiting`}</title>
      <rect class="prompt-bar" x={x} y={60 - height} width={0.8} height={height - answers} />
      <rect class="answer-bar" x={x} y={60 - answers} width={0.8} height={Math.max(answers, 0.5)} />
    </g>
  );
}
