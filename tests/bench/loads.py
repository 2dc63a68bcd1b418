"""An engine on a clock of its own: a step takes its time, and a number of requests run at once, first come, first served."""

from serving import Clock, Gain, Load

# When its clock starts.
START = 128.0


class Slow:
    """Serves `slots` requests at once, `tokens` a step each; the first step of a request brings one token.

    Attributes:
        log: (time, request, tokens, finished) of every gain.
        added: (time, request, lengths) of every request.
        ended: Names that were aborted.
    """

    def __init__(self, slots, tokens=3, step_seconds=0.25):
        self.slots, self.tokens, self.step_seconds = slots, tokens, step_seconds
        self.time, self.slept = START, 0.0
        self.running, self.waiting = {}, {}
        self.log, self.added, self.ended, self.met = [], [], [], []
        self.prompts = {}

    @property
    def clock(self):
        return Clock(lambda: self.time, self.sleep)

    def sleep(self, seconds):
        assert seconds > 0
        assert not self.running
        self.time += seconds
        self.slept += seconds

    def add(self, name, lengths, random):
        assert name not in self.prompts
        self.prompts[name] = random.integers(100, size=lengths.prompt).tolist()
        self.waiting[name] = lengths.output
        self.added.append((self.time, name, lengths))

    def step(self):
        while self.waiting and len(self.running) < self.slots:
            name = next(iter(self.waiting))
            self.running[name] = (self.waiting.pop(name), True)
        self.met.append(len(self.running) + len(self.waiting))
        self.time += self.step_seconds
        gains = []
        for name, (left, fresh) in list(self.running.items()):
            tokens = min(left, 1 if fresh else self.tokens)
            self.running[name] = (left - tokens, False)
            gains.append(Gain(name, tokens, left == tokens))
            if left == tokens:
                del self.running[name]
        self.log += [(self.time, *gain) for gain in gains]
        return gains

    def load(self):
        return Load(len(self.running) / self.slots, len(self.running), len(self.waiting))

    def counters(self):
        steps = len(self.met)
        return {"num_preemptions": 2 * steps, "spec_decode_num_drafts": steps, "spec_decode_num_accepted_tokens": 1.5 * steps}

    def abort(self, names):
        self.ended += names
        for name in names:
            self.running.pop(name, None)
            self.waiting.pop(name, None)
