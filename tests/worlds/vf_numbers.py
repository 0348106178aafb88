"""A taskset of verifiers with an environment: a number is to be found, and each guess is answered."""

import random

import verifiers.v1 as vf

__all__ = ["Numbers", "NumbersEnv"]


class NumberData(vf.TaskData):
    answer: int


class NumberTask(vf.Task[NumberData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.answer))

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 3)


class Numbers(vf.Taskset[NumberTask, vf.TasksetConfig]):
    def load(self):
        for i in range(8):
            yield NumberTask(NumberData(prompt=f"0 to 7, task {i}:", system_prompt="Guess.", answer=i))


class NumbersEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class NumbersEnv(vf.Env[NumbersEnvConfig]):
    """Three guesses. What is said has a random number, from Python's own generator."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(2):
                if segment.terminated or segment.last_reply.strip() == str(task.data.answer):
                    break
                if segment.last_reply == "fail":
                    raise KeyError("planted")
                if segment.last_reply == "again":
                    await agents.player.run(task)
                segment = await interaction.turn(f"no, {random.random()}")
