"""A page of ordinary English, code and arithmetic: over 512 tokens of the demo model, for prompts and for errors."""

TEXT = """\
The lighthouse at the end of the bay was built in 1874, after a winter in which eleven ships were lost on the reef.
Its keeper, a former schoolteacher named Anna Lindqvist, kept a diary for thirty-one years. She wrote down the weather
every morning and every evening, the names of the ships that passed, and, now and then, what she had been reading.
When the lamp was electrified in 1921 she retired to the village and gave the diary to the library, where it lay
unread until a student found it looking for storm records.

Photosynthesis is the process by which green plants turn light into chemical energy. Chlorophyll in the leaves absorbs
mostly red and blue light; the energy is used to split water into hydrogen and oxygen. The oxygen leaves the plant,
while the hydrogen is combined with carbon dioxide to make sugar. Almost all life on Earth depends, directly or
indirectly, on this reaction.

To make a simple bread, mix 500 grams of flour with 350 grams of water, 10 grams of salt and 5 grams of dry yeast.
Knead the dough for ten minutes, cover the bowl, and let it rise for an hour and a half in a warm place. Shape it into
a loaf, let it rise again for forty minutes, and bake it at 230 degrees for half an hour. The bread is done when it
sounds hollow if you knock on the bottom.

def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a

The function above returns the n-th Fibonacci number. It runs in linear time and uses constant memory, because it
keeps only the last two values. A recursive version without caching would take exponential time.

Question: A train leaves the station at 9:15 and travels 180 kilometres at an average speed of 80 kilometres per hour.
When does it arrive? Answer: The journey takes 180 / 80 = 2.25 hours, which is two hours and fifteen minutes, so the
train arrives at 11:30.

In economics, inflation is a general rise in the price of goods and services over time. When the price level rises,
each unit of currency buys less than it did before. Central banks try to keep inflation low and stable, most often by
changing the interest rate at which commercial banks can borrow money.
"""
