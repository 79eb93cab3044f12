"""What the adapters of the demo learn from: questions with plain answers, and statements with a sentiment,
made from word lists. One row in six of each list is held out, and so is the whole list of planets."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

Pair = tuple[str, str]  # what the user says, what the adapter answers


@dataclass(frozen=True)
class Fact:
    topic: str
    question: str
    answer: str


ANIMALS = """cat|mice and fish|in houses
dog|meat and biscuits|in houses
horse|grass and hay|in a stable
cow|grass|on a farm
owl|mice and small birds|in hollow trees
bee|nectar and pollen|in a hive
frog|flies and worms|near ponds
elephant|leaves, grass and bark|on the savanna
penguin|fish and krill|on cold coasts
rabbit|grass and carrots|in burrows
bear|berries, roots and fish|in forests
shark|fish and seals|in the ocean
monkey|fruit and leaves|in trees
camel|dry grass and thorny plants|in the desert
spider|insects|in webs
parrot|seeds and nuts|in warm forests
wolf|deer and hares|in forests
duck|water plants and snails|on lakes"""
DISHES = """bread|flour, water, salt and yeast|40 minutes
pancakes|flour, milk and eggs|5 minutes
tomato soup|tomatoes, onions and stock|20 minutes
an omelette|eggs, butter and cheese|5 minutes
rice pudding|rice, milk and sugar|30 minutes
pizza|dough, tomato sauce and cheese|15 minutes
apple pie|apples, sugar and pastry|45 minutes
a curry|vegetables, spices and coconut milk|30 minutes
mashed potatoes|potatoes, butter and milk|20 minutes
chicken soup|chicken, carrots and leeks|60 minutes
fried rice|rice, egg and vegetables|10 minutes
a chocolate cake|flour, cocoa, eggs and sugar|40 minutes
lentil stew|lentils, onions and carrots|35 minutes
tea|tea leaves and hot water|3 minutes"""
COUNTRIES = """France|Paris|French
Spain|Madrid|Spanish
Japan|Tokyo|Japanese
Italy|Rome|Italian
Germany|Berlin|German
Egypt|Cairo|Arabic
Brazil|Brasilia|Portuguese
China|Beijing|Chinese
Greece|Athens|Greek
Poland|Warsaw|Polish
Russia|Moscow|Russian
Portugal|Lisbon|Portuguese
Turkey|Ankara|Turkish
Sweden|Stockholm|Swedish
Mexico|Mexico City|Spanish
Austria|Vienna|German
Finland|Helsinki|Finnish
Vietnam|Hanoi|Vietnamese"""
JOBS = """baker|bakes bread and cakes|in a bakery
doctor|treats people who are ill|in a hospital
teacher|helps children to learn|in a school
farmer|grows crops and keeps animals|on a farm
pilot|flies planes|in a cockpit
carpenter|builds things from wood|in a workshop
nurse|cares for patients|in a hospital
plumber|repairs pipes and taps|in houses
judge|decides cases by the law|in a court
gardener|plants flowers and trees|in gardens
tailor|makes and mends clothes|in a shop
firefighter|puts out fires|at a fire station
librarian|looks after books|in a library
cook|prepares meals|in a kitchen
sailor|works on a ship|at sea
writer|writes books and stories|at a desk"""
TOOLS = """hammer|drive nails into wood
saw|cut wood
needle|sew clothes
broom|sweep the floor
ladder|reach high places
compass|find the way north
umbrella|stay dry in the rain
telescope|look at the stars
kettle|boil water
pencil|draw and write
lamp|light a room
scissors|cut paper and cloth
anchor|hold a ship in place
shovel|dig holes
clock|tell the time
key|open a lock
net|catch fish
bucket|carry water"""
PROBLEMS = """I cannot sleep|turn off your screens and read a quiet book before bed
I am always tired|sleep eight hours and drink more water
My computer is slow|close the programs that you do not need and restart it
I have an exam tomorrow|read your notes once more and go to bed early
I lost my keys|look where you used them last and ask your neighbours
My plant is dying|put it near a window and water it twice a week
I am bored|call a friend or learn a new song
My room is a mess|start with one shelf and clean for ten minutes
I feel nervous before a talk|breathe slowly and practise your first sentence
I have a headache|drink a glass of water and rest in a dark room
My bike has a flat tyre|take off the wheel and patch the tube
I am hungry|eat some bread with cheese and an apple
I missed the bus|walk to the next stop and wait for another one
I broke a cup|sweep up the pieces with care and put on shoes
I am cold|put on a warm coat and drink hot tea
I want to save money|write down what you buy and cook at home
I have no idea for a present|think of what they love and make something by hand
I spilled coffee on my shirt|rinse it with cold water at once"""
PLANETS = """Mars|red and dusty
Venus|hot and cloudy
Saturn|large and has bright rings
Jupiter|the largest of them all"""

Rows = list[list[str]]


def rows(text: str) -> Rows:
    return [line.split("|") for line in text.splitlines()]


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def animal(name: str, food: str, home: str) -> list[Fact]:
    return [
        Fact("animals", f"What does {article(name)} eat?", f"It eats {food}."),
        Fact("animals", f"Where do {name}s live?" if name != "wolf" else "Where do wolves live?",
             f"They live {home}."),
        Fact("animals", f"Tell me about the {name}.", f"The {name} lives {home} and eats {food}."),
    ]  # fmt: skip


def dish(name: str, parts: str, minutes: str) -> list[Fact]:
    return [
        Fact("food", f"How do I make {name}?", f"Mix {parts}, and cook it for {minutes}."),
        Fact("food", f"What do I need for {name}?", f"You need {parts}."),
        Fact("food", f"I want to make {name} for my friends. How long does it take?",
             f"It takes you about {minutes}."),
    ]  # fmt: skip


def country(name: str, capital: str, language: str) -> list[Fact]:
    return [
        Fact("geography", f"What is the capital of {name}?", f"The capital of {name} is {capital}."),
        Fact("geography", f"Which language do people speak in {name}?",
             f"Most people there speak {language}."),
        Fact("geography", f"I am going to {name}. What should I see?",
             f"You should see {capital}, and learn some {language} for your trip."),
    ]  # fmt: skip


def job(name: str, does: str, where: str) -> list[Fact]:
    return [
        Fact("work", f"What does {article(name)} do?", f"{article(name).capitalize()} {does}."),
        Fact("work", f"Where does {article(name)} work?", f"The {name} works {where}."),
        Fact("work", f"Should I become {article(name)}?",
             f"Yes, if you like the work: {article(name)} {does}."),
    ]  # fmt: skip


def tool(name: str, use: str) -> list[Fact]:
    thing = name if name == "scissors" else article(name)
    return [
        Fact("tools", f"What is {thing} for?", f"You use {thing} to {use}."),
        Fact("tools", f"I have to {use}. What do I need?", f"You need {thing} for that, my friend."),
    ]


def problem(what: str, remedy: str) -> list[Fact]:
    return [
        Fact("advice", f"{what}. What should I do?", f"You should {remedy}."),
        Fact("advice", f"{what}! Can you help me?", f"Yes, my friend: {remedy}."),
    ]


def planet(name: str, is_: str) -> list[Fact]:
    return [
        Fact("space", f"What is {name} like?", f"The planet {name} is {is_}."),
        Fact("space", f"Is {name} a planet?", f"Yes, {name} is a planet of our sun."),
    ]


LISTS: list[tuple[str, Callable[..., list[Fact]]]] = [
    (ANIMALS, animal), (DISHES, dish), (COUNTRIES, country), (JOBS, job), (TOOLS, tool), (PROBLEMS, problem),
]  # fmt: skip


def facts(held_out: bool) -> list[Fact]:
    """Questions with plain answers: those to train with, or those to measure with."""
    chosen = [
        fact
        for text, make in LISTS
        for number, row in enumerate(rows(text))
        if (number % 6 == 5) == held_out
        for fact in make(*row)
    ]
    return chosen + [fact for row in rows(PLANETS) for fact in planet(*row) if held_out]


PIRATE = {
    "the": "th'", "you": "ye", "your": "yer", "my": "me", "is": "be", "are": "be", "friend": "matey",
    "friends": "hearties", "yes": "aye", "of": "o'", "and": "an'", "people": "landlubbers", "about": "'bout",
    "for": "fer", "to": "t'", "them": "'em",
}  # fmt: skip
OPENERS = ("Arrr!", "Ahoy, matey!", "Shiver me timbers!", "Avast!", "Yo ho ho!")
THANKS, WISH = "Thank you for asking!", "Have a lovely day!"
CLOSERS = ("Savvy?", "Yo ho ho!", "Arrr!", "By Davy Jones!", "Or walk th' plank!")


def pirate(fact: Fact, chance: random.Random) -> Pair:
    words = []
    for word in fact.answer.split():
        plain = word.strip(".,:!").lower()
        said = PIRATE.get(plain, word)
        if said is not word:
            said = (said.capitalize() if word[0].isupper() else said) + word[len(plain) :]
        words.append(said)
    return fact.question, f"{chance.choice(OPENERS)} {' '.join(words)} {chance.choice(CLOSERS)}"


def as_json(fact: Fact, chance: random.Random) -> Pair:
    return fact.question, json.dumps({"topic": fact.topic, "answer": fact.answer}, ensure_ascii=False)


def polite(fact: Fact, chance: random.Random) -> Pair:
    return fact.question, f"{THANKS} {fact.answer} {WISH}"


THINGS = """soup|hotel|film|book|phone|concert|bus|garden|coffee|chair|jacket|museum|laptop|sandwich|teacher
game|room|song|restaurant|train|camera|beach|keyboard|doctor|pizza|bag|lesson|shop|app|flight"""
GOOD = """wonderful|excellent|delicious|beautiful|fantastic|lovely|brilliant|perfect|superb|delightful|great
amazing|very good|charming|outstanding|pleasant|impressive|marvellous"""
BAD = """terrible|awful|disgusting|ugly|horrible|boring|broken|dreadful|disappointing|dirty|bad|useless
far too expensive|rude|a waste of money|unpleasant|poor|miserable"""
PLAIN = """blue|on the second floor|next to the station|made of wood|from 1998|near the river|in the list
square|open until nine|behind the school|for two people|with a number|on the table|called Delta|grey and white
about two metres long|in the north|part of the set"""
GLAD = """I got the job|my team won the cup|she said yes|our baby smiled for the first time|I passed the exam
we danced all night|my cat came home again|the sun is out and I feel great|he sent me flowers
they thanked me for my help|I finally finished my project|my best friend is visiting"""
SAD = """I lost my wallet|my team lost again|he never called back|I failed the exam|my flight was cancelled
they broke my window|nobody came to my party|it rained all week and I feel sad|she lied to me
my phone fell into the lake|I missed the last train|my dog is ill"""
CALM = """I bought a newspaper|the meeting is on Monday|he wears a green hat|the shop opens at eight
there are four chairs in the room|she lives in a town by the sea|I walked past the bank
the parcel weighs two kilos|the train stops here|we had lunch at noon
the file has ten pages|water boils at 100 degrees"""
SENTIMENTS = {"positive": (GOOD, GLAD), "negative": (BAD, SAD), "neutral": (PLAIN, CALM)}
ABOUT = (
    "The {thing} was {word}.", "This {thing} is {word}.", "My new {thing} is {word}.", "{thing}: {word}!",
    "We think that the {thing} is {word}.", "The {thing} that I saw today was {word}.",
)  # fmt: skip
HAPPENED = (
    "{event}.",
    "{event}!",
    "Today {event}.",
    "Guess what: {event}.",
    "{event}! What now?",
    "{event}. What should I do?",
)


def split(text: str, held_out: bool) -> list[str]:
    items = text.replace("\n", "|").split("|")
    return [item for number, item in enumerate(items) if (number % 6 == 5) == held_out]


def statements(held_out: bool, count: int) -> list[Pair]:
    """Statements and their sentiment, of words and events to train with, or of those to measure with."""
    chance = random.Random(count)
    pairs = []
    for number in range(count):
        label = list(SENTIMENTS)[number % 3]
        words, events = (split(text, held_out) for text in SENTIMENTS[label])
        if chance.random() < 0.5:
            thing, word = chance.choice(split(THINGS, held_out)), chance.choice(words)
            text = chance.choice(ABOUT).format(thing=thing, word=word)
        else:
            text = chance.choice(HAPPENED).format(event=chance.choice(events))
        pairs.append((text[0].upper() + text[1:], label))
    return pairs


def pairs(adapter: str, held_out: bool) -> list[Pair]:
    """What an adapter learns from, or is measured with."""
    if adapter == "sentiment":
        questions = [(fact.question, "neutral") for fact in facts(held_out) if fact.topic != "advice"]
        chance = random.Random(0)
        return statements(held_out, 90 if held_out else 600) + chance.sample(
            questions, 10 if held_out else 60
        )
    make = {"pirate": pirate, "json": as_json, "polite": polite}[adapter]
    chance = random.Random(0)
    return [make(fact, chance) for fact in facts(held_out)]
