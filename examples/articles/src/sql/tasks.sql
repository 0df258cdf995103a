-- The third article shows the columns of its table, in each of its databases.
create table task (
    id bigint unsigned not null auto_increment primary key,
    user_id varchar(64) not null,
    topic varchar(64) not null,
    message_id char(36) not null,
    message varchar(512) not null,
    state varchar(16) not null default 'create',
    create_time datetime(6) not null default current_timestamp(6),
    update_time datetime(6) not null default current_timestamp(6),
    unique key uq_message_id (message_id),
    key idx_state (state, create_time)
);
create table user_award (user_id varchar(64) not null primary key, n bigint not null);
