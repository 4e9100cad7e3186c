"""Start with the workers that there is room for, and grow when there is more; a worker is killed on the way.

pip install '.[xgboost-cpu]'
python examples/elastic.py
"""
