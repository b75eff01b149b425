-- Sums of the ledger by day and month of UTC, and by whose limits count it: cluster, pool/<name>, zone/<name>,
-- project/<name>. Kept in the same transaction as the ledger.
CREATE TABLE charged_periods (
    period TEXT NOT NULL,
    owner TEXT NOT NULL,
    micro_usd INTEGER NOT NULL,
    PRIMARY KEY (period, owner)
);

-- What was charged before this table was: spans are a minute long, so each counts where it began.
INSERT INTO charged_periods (period, owner, micro_usd)
SELECT strftime('%Y-%m-%d', from_at / 1000000, 'unixepoch'), 'cluster', sum(total_micro_usd) FROM ledger GROUP BY 1;
INSERT INTO charged_periods (period, owner, micro_usd)
SELECT strftime('%Y-%m', from_at / 1000000, 'unixepoch'), 'cluster', sum(total_micro_usd) FROM ledger GROUP BY 1;
